"""Texts of a real server: the same whole and in parts, and ended by stop texts over token borders."""

from __future__ import annotations

import httpx
import pytest

from tests.inference.server.http_client import events
from tests.inference.server.real_server import RealServer


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_text_ends_a_served_text_wherever_tokens_begin(server: RealServer, seed: int):
    def complete(**more):
        body = {"prompt": "def add", "max_tokens": 40, "temperature": 1.5, "seed": seed} | more
        return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)

    whole = complete(ignore_eos=True, return_token_ids=True).json()["choices"][0]
    text, count = whole["text"], len(whole["token_ids"])
    assert count == 40
    for begin in (0, len(text) // 3, len(text) // 2):
        stop = text[begin : begin + 5]
        more = {"ignore_eos": True, "stop": ["\ue000", stop]}
        answer = complete(**more)
        choice = answer.json()["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        stream = complete(**more, stream=True, stream_options={"include_usage": True})
        *parts, last = events(stream)
        assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["usage"] == answer.json()["usage"]
