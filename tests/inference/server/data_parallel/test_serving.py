"""`ptq serve --data-parallel 2 --adapter`: two real engines give what `Engine` gives; one may die."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from inference.beam_search import BeamParams, beam_search
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter
from tests.inference.server.real_server import RealServer, gone

SECONDS = 30
KEY = {"Authorization": "Bearer key"}
MODELS = ["tiny", "sql", "poet"]
TALKS = [[40 + i, *range(60, 260), 40 + i] for i in range(4)]  # each begins otherwise


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
def pair(base, folders, chat_template):
    """A server of two engines; the last test kills them."""
    options = ["--data-parallel", "2", "--api-key", "key", "--chat-template", str(chat_template)]
    options += ["--served-model-name", "tiny"]
    options += [f"--adapter={name}={folders[name]}" for name in ("sql", "poet")]
    with RealServer(base, *options) as started:
        yield started


@pytest.fixture
def two(pair) -> str:
    return pair.address


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


def counts(address: str, name: str) -> dict[str, float]:
    """A metric's values by their engine, those of one engine added."""
    text, found = httpx.get(f"{address}/metrics", headers=KEY).text, {"0": 0.0, "1": 0.0}
    for engine, value in re.findall(rf'^ptq:{name}{{.*engine="(\d)".*}} (\S+)$', text, re.M):
        found[engine] += float(value)
    return found


def test_answers_are_those_of_one_engine_and_both_give_them(pair, engine):
    prompts = [[5 + i, *range(i + 3), 7] for i in range(30)]
    before = counts(pair.address, "generation_tokens_total")

    def ask(prompt: list[int]) -> list[int]:
        return complete(pair.address, "tiny", prompt, temperature=1.0, seed=len(prompt))

    with ThreadPoolExecutor(10) as clients:
        found = list(clients.map(ask, prompts))
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=len(p)) for p in prompts]
    assert found == [list(output.token_ids) for output in engine.generate(prompts, params)]
    after = counts(pair.address, "generation_tokens_total")
    assert all(after[name] > before[name] for name in after)
    assert "2 x cpu: 128 requests at once" in pair.greeting


def test_requests_that_begin_alike_find_their_beginning(two):
    """Of 4 talks of 6 turns each, the 5 later turns find the 192 tokens that are whole blocks."""
    hits, routed = (counts(two, name) for name in ("prefix_cache_hits_total", "routed.*"))
    for turn in range(6):
        for talk in TALKS:
            complete(two, "tiny", [*talk, *range(70, 70 + turn)])
    now = counts(two, "prefix_cache_hits_total")
    gained = {engine: now[engine] - hits[engine] for engine in now}
    assert sum(gained.values()) >= 4 * 5 * 192
    assert min(gained.values()) >= 5 * 192  # no engine got them all
    after = counts(two, "routed.*")
    assert sum(after.values()) - sum(routed.values()) == 24


def test_one_that_is_killed_leaves_the_other_and_the_last_ends_the_server(pair):
    first, second = pair.engines
    first.kill()
    assert gone(first)
    until, health = time.monotonic() + SECONDS, f"{pair.address}/health"
    while (found := httpx.get(health, headers=KEY).json())["status"] != "degraded":
        assert time.monotonic() < until
    assert [engine["state"] for engine in found["engines"]] == ["dead", "ready"]
    assert "exit code -9" in found["engines"][0]["reason"]
    while "engine 0 of 2: the engine process died with exit code -9" not in pair.errors:
        assert time.monotonic() < until, pair.errors
    for talk in TALKS:
        complete(pair.address, "tiny", talk)
    second.kill()
    assert pair.end() == 2
    assert "error: engine 0 of 2" in pair.errors
    assert "engine 1 of 2: the engine process died" in pair.errors
