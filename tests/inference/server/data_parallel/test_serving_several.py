"""`ptq serve --data-parallel 2`: two real engines give what one gives, and one may die."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.inference.server.real_server import RealServer, gone

SECONDS = 30
TALKS = [[40 + i, *range(60, 260), 40 + i] for i in range(4)]  # each begins otherwise


@pytest.fixture(scope="module")
def two(make_model):
    """A server of two engines; the last test kills them."""
    options = ("--data-parallel", "2", "--served-model-name", "tiny")
    with RealServer(make_model(max_position_embeddings=2048), *options) as started:
        yield started


def ask(address: str, prompt: list[int], **values) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": len(prompt)} | values
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def counts(address: str, name: str) -> dict[str, float]:
    """A metric's values by their engine, those of one engine added."""
    text, found = httpx.get(f"{address}/metrics").text, {"0": 0.0, "1": 0.0}
    for engine, value in re.findall(rf'^ptq:{name}{{.*engine="(\d)".*}} (\S+)$', text, re.M):
        found[engine] += float(value)
    return found


def test_answers_are_those_of_one_engine_and_both_give_them(two, server):
    prompts = [[5 + i, *range(i + 3), 7] for i in range(30)]
    with ThreadPoolExecutor(10) as clients:
        found = list(clients.map(ask, [two.address] * 30, prompts))
        expected = list(clients.map(ask, [server.address] * 30, prompts))
    assert found == expected
    assert min(counts(two.address, "generation_tokens_total").values()) > 0
    assert "2 x cpu: 128 requests at once" in two.greeting


def test_requests_that_begin_alike_find_their_beginning(two):
    """Of 4 talks of 6 turns each, the 5 later turns find the 192 tokens that are whole blocks."""
    hits, routed = (counts(two.address, name) for name in ("prefix_cache_hits_total", "routed.*"))
    for turn in range(6):
        for talk in TALKS:
            ask(two.address, [*talk, *range(70, 70 + turn)])
    now = counts(two.address, "prefix_cache_hits_total")
    gained = {engine: now[engine] - hits[engine] for engine in now}
    assert sum(gained.values()) >= 4 * 5 * 192
    assert min(gained.values()) >= 5 * 192  # no engine got them all
    after = counts(two.address, "routed.*")
    assert sum(after.values()) - sum(routed.values()) == 24


def test_one_that_is_killed_leaves_the_other_and_the_last_ends_the_server(two):
    first, second = two.engines
    first.kill()
    assert gone(first)
    until = time.monotonic() + SECONDS
    while (health := httpx.get(f"{two.address}/health")).json()["status"] != "degraded":
        assert time.monotonic() < until
    assert [engine["state"] for engine in health.json()["engines"]] == ["dead", "ready"]
    assert "exit code -9" in health.json()["engines"][0]["reason"]
    while "engine 0 of 2: the engine process died with exit code -9" not in two.errors:
        assert time.monotonic() < until, two.errors
    for talk in TALKS:
        ask(two.address, talk)
    second.kill()
    assert two.end() == 2
    assert "error: engine 0 of 2" in two.errors
    assert "engine 1 of 2: the engine process died" in two.errors
