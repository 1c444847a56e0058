"""`ptq serve --adapter` on two real engines: the tokens are those of `Engine` with the adapters."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from inference.beam_search import BeamParams, beam_search
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter
from tests.inference.server.real_server import RealServer

SECONDS = 30
KEY = {"Authorization": "Bearer key"}
MODELS = ["tiny", "sql", "poet"]


@pytest.fixture(scope="module")
def base(make_model) -> Path:
    return make_model(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("adapters")
    seeds = {"sql": 1, "poet": 2, "late": 3}
    return {name: write_adapter(work / name, base, seed=seed) for name, seed in seeds.items()}


@pytest.fixture(scope="module")
def engine(base, folders) -> Engine:
    return Engine.from_pretrained(base, adapters=folders)


@pytest.fixture(scope="module")
def two(base, folders, chat_template):
    options = ["--data-parallel", "2", "--api-key", "key", "--chat-template", str(chat_template)]
    options += ["--served-model-name", "tiny"]
    options += [f"--adapter={name}={folders[name]}" for name in ("sql", "poet")]
    with RealServer(base, *options) as started:
        yield started.address


def post(address: str, route: str, **body) -> httpx.Response:
    return httpx.post(f"{address}/v1/{route}", json=body, headers=KEY, timeout=SECONDS)


def complete(address: str, model: str, prompt: list[int], **values) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "return_token_ids": True}
    answer = post(address, "completions", model=model, **body | values)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def expected(engine: Engine, model: str, prompt: list[int], max_tokens: int = 12) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, adapter=None if model == "tiny" else model)
    return list(engine.generate([prompt], params)[0].token_ids)


def streamed(address: str, **body) -> list[int]:
    """The tokens of a stream."""
    found: list[int] = []
    url, body = f"{address}/v1/completions", body | {"stream": True, "return_token_ids": True}
    with httpx.stream("POST", url, json=body, headers=KEY, timeout=SECONDS) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return found


def test_streams_chats_and_beams_run_with_the_adapter_that_the_model_names(two, engine):
    prompt, own = [5, 6, 7], {}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    for model in MODELS:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        stream = streamed(two, **body)
        assert stream == expected(engine, model, prompt)
        answer = post(
            two, "chat/completions", model=model, temperature=0, return_token_ids=True, **chat
        ).json()
        talked = answer["choices"][0]["token_ids"]
        assert talked == expected(engine, model, answer["prompt_token_ids"])
        params = BeamParams(beam_width=3, max_tokens=12, adapter=None if model == "tiny" else model)
        beams = complete(two, model, prompt, beam_width=3, temperature=None)
        assert beams == list(beam_search(engine, [prompt], params)[0][0].token_ids)
        own[model] = stream, talked, beams
    for kind in range(3):
        assert len({tuple(own[model][kind]) for model in MODELS}) == 3


def test_requests_of_several_adapters_at_once_do_not_meet(two, engine):
    """They have the first 64 tokens in common, which the cache holds for each adapter."""
    asked = [(MODELS[i % 3], [*range(5, 75), 5 + i]) for i in range(24)]
    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda one: complete(two, *one), asked))
    assert found == [expected(engine, *one) for one in asked]


def test_an_adapter_is_loaded_and_unloaded_beside_requests(two, engine, folders, tmp_path):
    body = {"model": "sql", "prompt": [8, 9], "max_tokens": 900, "ignore_eos": True}
    with ThreadPoolExecutor(2) as others:
        long = others.submit(streamed, two, temperature=0, **body)
        loaded = post(two, "load_lora_adapter", lora_name="late", lora_path=str(folders["late"]))
        assert loaded.status_code == 200, loaded.text
        found = [complete(two, "late", [5, 6, 7 + i]) for i in range(4)]
        assert found == [expected(engine, "late", [5, 6, 7 + i]) for i in range(4)]
        damaged = post(two, "load_lora_adapter", lora_name="bad", lora_path=str(tmp_path))
        assert damaged.status_code == 400
        assert "adapter_config.json" in damaged.json()["error"]["message"]
        params = SamplingParams(max_tokens=900, ignore_eos=True, adapter="sql")
        assert long.result() == list(engine.generate([[8, 9]], params)[0].token_ids)
    assert post(two, "unload_lora_adapter", lora_name="late").status_code == 200
    gone = post(two, "completions", model="late", prompt=[5])
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_an_adapter_in_use_is_not_unloaded_by_any_engine(two, engine):
    begun = threading.Event()

    def read() -> None:
        body = {"model": "poet", "prompt": [8, 9], "max_tokens": 1900, "ignore_eos": True}
        url, body = f"{two}/v1/completions", body | {"stream": True}
        with httpx.stream("POST", url, json=body, headers=KEY, timeout=SECONDS) as answer:
            for _ in answer.iter_lines():
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(SECONDS)
    refused = post(two, "unload_lora_adapter", lora_name="poet")
    assert refused.status_code == 400, "the request has ended before"
    assert "wait or run" in refused.json()["error"]["message"]
    for i in range(4):  # at both engines
        assert complete(two, "poet", [40 + i]) == expected(engine, "poet", [40 + i])
    reader.join(SECONDS)
    assert post(two, "unload_lora_adapter", lora_name="poet").status_code == 200
