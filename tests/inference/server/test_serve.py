"""`ptq serve` as its user sees it: real processes, real sockets, signals and kills."""

import json
import re
import shlex
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.inference.server.real_server import RealServer, gone

SECONDS = 30
AT_ONCE = 5  # seconds, on a machine that has much else to do


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
    options = ("--max-model-len", "8192", "--drain-seconds", "2", "--log-requests")
    with RealServer(long_model, *options) as server:
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
        assert re.search(
            r"POST /v1/completions 200 .* tokens=2\+\d+ error=503$", server.errors, re.M
        )


def wait_for(ask, status: int) -> httpx.Response:
    until = time.monotonic() + SECONDS
    while (answer := ask()).status_code != status:
        assert time.monotonic() < until, answer.text
    return answer


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_server_whose_log_is_on_a_full_disk_answers_and_stops(make_model):
    """What a signal could not write kept it from stopping, and the next one too."""
    with RealServer(make_model("llama"), "--log-requests", full_log=True) as server:
        blocks = metrics(server.address)
        assert blocks["ptq:kv_cache_blocks_free"] == blocks["ptq:kv_cache_blocks_total"] > 0
        assert complete(server.address).status_code == 200
        server.process.terminate()
        assert server.end() == 0


@pytest.mark.ci  # starts a server
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
        assert time.monotonic() - start < AT_ONCE
        assert stream.error is not None


@pytest.mark.ci  # starts three servers
def test_a_killed_process_takes_the_other_along_and_a_restart_is_clean(long_model, server):
    """Of a server the engine is killed; of the one that takes its port, HTTP. A third stays."""
    with RealServer(long_model, "--max-model-len", "8192") as sick:
        stream = Stream(sick.address, 8000)
        start = time.monotonic()
        sick.engine.kill()
        stream.join(SECONDS)
        assert stream.ended - start < AT_ONCE
        (told,) = [e["error"] for e in stream.events if "error" in e]
        assert "died with exit code -9" in told["message"]
        health = httpx.get(f"{sick.address}/health")
        assert health.status_code == 503
        assert "exit code -9" in health.text
        assert sick.end() == 2
        assert "error: the engine process died with exit code -9" in sick.errors

    port = sick.address.rpartition(":")[2]
    with RealServer(long_model, "--max-model-len", "8192", "--port", port) as restarted:
        assert restarted.address == sick.address
        stream, engine = Stream(restarted.address, 8000), restarted.engine
        start = time.monotonic()
        restarted.process.kill()
        stream.join(SECONDS)
        assert stream.ended - start < AT_ONCE
        assert stream.error is not None
        assert gone(engine)
    assert complete(server.address).status_code == 200


def metrics(address: str) -> dict[str, float]:
    """Of the engine, without labels."""
    text = httpx.get(f"{address}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(\S+?){.*} (\S+)$", text, re.M)}


def test_clients_that_leave_give_everything_back(server):
    """Streaming or not, running or queued: of 90 that leave, nothing is left soon after."""
    body = {"prompt": [7] * 100, "max_tokens": 400, "ignore_eos": True}
    before = metrics(server.address)
    sockets = []
    for i in range(90):  # 64 run, the others wait
        data = json.dumps(body | {"stream": i % 2 == 0, "seed": i}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        host, port = server.address.removeprefix("http://").split(":")
        sockets.append(socket.create_connection((host, int(port))))
        sockets[-1].sendall(head.encode() + data)
    until = time.monotonic() + SECONDS
    while metrics(server.address)["ptq:num_requests_in_flight"] < 65:
        assert time.monotonic() < until
    for one in sockets:
        one.close()
    while (now := metrics(server.address))["ptq:num_requests_in_flight"]:
        assert time.monotonic() < until
    while (now := metrics(server.address))["ptq:kv_cache_blocks_used"]:
        assert time.monotonic() < until
    assert now["ptq:num_requests_running"] == now["ptq:num_requests_waiting"] == 0
    kept = now["ptq:kv_cache_blocks_free"] + now["ptq:kv_cache_blocks_cached"]
    assert kept == now["ptq:kv_cache_blocks_total"]
    made = now["ptq:generation_tokens_total"] - before["ptq:generation_tokens_total"]
    assert made < 90 * 400  # they did not run to their end
