"""`ptq serve` as its user sees it: real processes, real sockets, signals and kills."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.inference.server.real_server import RealServer, gone

SECONDS = 30


@pytest.fixture(scope="module")
def long_model(make_model) -> Path:
    """One whose requests may run for long."""
    return make_model("llama", max_position_embeddings=8192)


class Stream(threading.Thread):
    """Reads a streamed completion.

    Attributes:
        events: What came, `[DONE]` as text.
        error: How the connection broke, if it did.
        ended: When it was over, seconds of `time.monotonic`.
    """

    def __init__(self, address: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{address}/v1/completions"
        self._body = {
            "prompt": [5, 6],
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self.events: list = []
        self.error: Exception | None = None
        self.ended = 0.0
        self._begun = threading.Event()
        self.start()
        assert self._begun.wait(SECONDS)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=SECONDS) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
                        self._begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.ended = time.monotonic()
        self._begun.set()

    @property
    def tokens(self) -> int:
        """Events with a choice, of which each has a token at least."""
        return sum("choices" in event for event in self.events if event != "[DONE]")


def complete(address: str, **values) -> httpx.Response:
    body = {"prompt": [5, 6], "max_tokens": 4} | values
    return httpx.post(f"{address}/v1/completions", json=body, timeout=SECONDS)


def test_the_printed_line_is_one_to_paste(server):
    line = re.search(r"^ {4}(curl .*)$", server.greeting, re.MULTILINE)[1]
    done = subprocess.run([*shlex.split(line), "-sS"], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant", answer
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_draining_server_finishes_what_it_can_and_tells_the_rest(long_model):
    """SIGTERM while two are answered: the short one ends, the long one is told, others refused."""
    with RealServer(long_model, "--max-model-len", "8192", "--drain-seconds", "2") as server:
        engine = server.engine
        long, short = Stream(server.address, 8000), Stream(server.address, 300)
        server.process.terminate()
        refused = wait_for(lambda: complete(server.address), 503)
        assert "stopping" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.address}/health").status_code == 503
        short.join(SECONDS)
        long.join(SECONDS)
        assert short.events[-1] == "[DONE]"
        assert short.tokens > 50
        told = [e["error"]["message"] for e in long.events if "error" in e]
        assert told == ["the server is stopping"]
        assert server.end() == 0
        assert gone(engine)
        assert "what runs may finish, for 2 s" in server.errors


def wait_for(ask, status: int) -> httpx.Response:
    until = time.monotonic() + SECONDS
    while (answer := ask()).status_code != status:
        assert time.monotonic() < until, answer.text
    return answer


def test_a_second_ctrl_c_ends_it_at_once(long_model):
    with RealServer(long_model, "--max-model-len", "8192") as server:
        engine = server.engine
        stream = Stream(server.address, 8000)
        server.interrupt()
        wait_for(lambda: httpx.get(f"{server.address}/health"), 503)
        before = stream.tokens
        time.sleep(0.1)
        assert stream.tokens > before  # the first one left the engine alone
        start = time.monotonic()
        server.interrupt()
        assert server.end() == 130
        assert gone(engine)
        stream.join(SECONDS)
        assert time.monotonic() - start < 2
        assert stream.error is not None


def test_two_servers_whose_processes_are_killed(long_model):
    """They share a machine and nothing else. Of one the engine is killed, of the other HTTP."""
    one = RealServer(long_model, "--max-model-len", "8192")
    with RealServer(long_model, "--max-model-len", "8192") as other, one:
        streams = Stream(one.address, 8000), Stream(other.address, 8000)

        start = time.monotonic()
        one.engine.kill()
        streams[0].join(SECONDS)
        assert streams[0].ended - start < 1
        (told,) = [e["error"] for e in streams[0].events if "error" in e]
        assert "died with exit code -9" in told["message"]
        sick = httpx.get(f"{one.address}/health")
        assert sick.status_code == 503
        assert "exit code -9" in sick.text
        assert one.end() == 2
        assert "error: the engine process died with exit code -9" in one.errors

        engine = other.engine
        start = time.monotonic()
        other.process.send_signal(signal.SIGKILL)
        streams[1].join(SECONDS)
        assert streams[1].ended - start < 1
        assert streams[1].error is not None
        assert gone(engine)
        port = other.address.rpartition(":")[2]
        with RealServer(long_model, "--port", port) as again:  # the port is free, at once
            assert complete(again.address).status_code == 200
