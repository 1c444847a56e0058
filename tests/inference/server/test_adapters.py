"""Requests that name adapters, and adapters that are loaded and unloaded while a server runs."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from inference.server.messages import Submit
from tests.inference.server.fake_engine import INFO, FakeEngine
from tests.inference.server.http_client import ask, post, talking

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
TEXT = {"prompt": "a", "max_tokens": 3}
KEY = {"Authorization": "Bearer key"}


def adapted() -> FakeEngine:
    return FakeEngine(info=replace(INFO, adapters={"sql": "adapters/sql", "poet": "adapters/poet"}))


def test_the_list_of_models_has_the_adapters():
    found = ask("GET", "/v1/models", make=adapted).json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in found] == [
        ("tiny", "tiny", None),
        ("sql", "adapters/sql", "tiny"),
        ("poet", "adapters/poet", "tiny"),
    ]
    assert ask("GET", "/v1/models/poet", make=adapted).json() == found[2]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", TEXT | {"n": 2}),
        ("completions", TEXT | {"stream": True}),
        ("completions", TEXT | {"beam_width": 2}),
        ("chat/completions", CHAT),
        ("chat/completions", CHAT | {"stream": True, "n": 2}),
        ("chat/completions", CHAT | {"beam_width": 2}),
        ("responses", {"input": "a", "max_output_tokens": 16}),
        ("responses", {"input": "a", "max_output_tokens": 16, "stream": True}),
    ],
)
@pytest.mark.parametrize(("model", "adapter"), [("sql", "sql"), ("tiny", None), (None, None)])
async def test_a_request_runs_with_what_its_model_names(route, body, model, adapter):
    async with talking(adapted) as (client, engine):
        answer = await client.post(f"/v1/{route}", json=body | ({"model": model} if model else {}))
        sent = [one for one in engine.sent if isinstance(one, Submit)]
        assert [one.params.adapter for one in sent] == [adapter] * body.get("n", 1)
    assert answer.status_code == 200, answer.text
    assert f'"model":"{model or "tiny"}"' in answer.text.replace('": "', '":"')


def test_an_unknown_model_is_told_what_there_is():
    answer = post("/v1/completions", TEXT | {"model": "sq"}, make=adapted)
    assert answer.status_code == 404
    told = "model: there is no 'sq'; this server has 'tiny' and 'sql' and 'poet'"
    assert answer.json()["error"]["message"] == told
    loading = post("/v1/completions", TEXT | {"model": "sql"}, make=lambda: FakeEngine(warm=False))
    assert loading.status_code == 503


async def test_adapters_come_and_go(tmp_path):
    async with talking(api_key="key") as (client, engine):

        async def set_adapter(way: str, **values: str) -> httpx.Response:
            body = {f"lora_{name}": value for name, value in values.items()}
            return await client.post(f"/v1/{way}_lora_adapter", json=body, headers=KEY)

        async def names() -> list[str]:
            models = (await client.get("/v1/models", headers=KEY)).json()
            return [one["id"] for one in models["data"]]

        loaded = await set_adapter("load", name="sql", path=str(tmp_path))
        assert (loaded.status_code, loaded.json()["root"]) == (200, str(tmp_path))
        assert await names() == ["tiny", "sql"]
        used = await client.post("/v1/completions", json=TEXT | {"model": "sql"}, headers=KEY)
        assert used.status_code == 200
        answers = [
            await set_adapter("load", name="sql", path=str(tmp_path)),
            await set_adapter("load", name="tiny", path=str(tmp_path)),
            await set_adapter("load", name="poet", path=str(tmp_path / "none")),
            await set_adapter("load", name="poet", path="\0"),
            await set_adapter("unload", name="poet"),
        ]
        assert (await set_adapter("unload", name="sql")).json()["deleted"]
        assert await names() == ["tiny"]
        gone = await client.post("/v1/completions", json=TEXT | {"model": "sql"}, headers=KEY)
        assert gone.status_code == 404
        assert not engine.client.in_flight
    assert [answer.status_code for answer in answers] == [400] * 5
    told = [answer.json()["error"]["message"] for answer in answers]
    assert told[0] == "adapter: found 'sql'"
    assert "a name of the model" in told[1]
    assert f"no folder '{tmp_path}/none'" in told[2]
    assert told[4] == "adapter: found 'poet'"


@pytest.mark.parametrize("way", ["load", "unload"])
def test_they_are_set_by_those_alone_who_show_a_key(way, tmp_path):
    body = {"lora_name": "sql"} | ({"lora_path": str(tmp_path)} if way == "load" else {})
    answer = post(f"/v1/{way}_lora_adapter", body, make=adapted)
    assert answer.status_code == 404
    assert "--api-key-file" in answer.json()["error"]["message"]
    assert post(f"/v1/{way}_lora_adapter", body, make=adapted, api_key="key").status_code == 401


async def test_an_engine_that_dies_meanwhile_is_told(tmp_path):
    async with talking(lambda: FakeEngine(hold=True), api_key="key") as (client, engine):
        body = {"lora_name": "sql", "lora_path": str(tmp_path)}
        loading = asyncio.create_task(client.post("/v1/load_lora_adapter", json=body, headers=KEY))
        while not engine.sent:
            await asyncio.sleep(0)
        engine.die("out of memory")
        answer = await loading
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "out of memory")
