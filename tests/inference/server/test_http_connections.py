"""Clients that leave, stall or send too much, on real connections."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvicorn

from inference.server.http import responses
from inference.server.http.responses import dumps, quote
from inference.server.serving import BoundedProtocol, create_app
from inference.server.settings import Limits
from tests.inference.server.fake_engine import INFO, FakeEngine
from tests.inference.server.http_client import settings

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hello"}]
LONG = replace(INFO, max_model_len=2**20, max_positions=2**20)


def request(path: str, body: dict, headers: str = "") -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


servers: list[uvicorn.Server] = []


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that is to come soon."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def served(
    make: Callable[[], FakeEngine] = FakeEngine, **values: Any
) -> AsyncIterator[tuple[FakeEngine, int]]:
    """An engine, and the port of a real server before it."""
    engine = make()
    app = create_app(engine.client, settings(**values))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    protocol = partial(BoundedProtocol, limits=app.state.served.settings.limits)
    server = uvicorn.Server(
        uvicorn.Config(app, http=protocol, log_level="critical", ws="none")  # type: ignore
    )
    servers.append(server)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        async with asyncio.timeout(60):
            yield engine, listener.getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        await serving


@pytest.mark.parametrize("hold", [True, False], ids=["queued", "decoding"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 10**6}),
        ("/v1/completions", {"prompt": [[1], [2]], "n": 2, "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/generate", {"prompt": "a", "max_new_tokens": 10**6}),
    ],
    ids=["completion", "completions", "chat", "generate"],
)
async def test_a_client_that_leaves_ends_its_requests(path, body, stream, hold):
    async with served(lambda: FakeEngine(hold=hold, delay=0.002, info=LONG)) as (engine, port):
        count = 4 if body.get("n") else 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(path, body | {"stream": stream}))
        await until(lambda: len(engine.running) == count)
        if stream and not hold:
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1000)
        writer.transport.abort()
        await until(lambda: not engine.running)
        assert len(set(engine.aborted)) == count
        assert not engine.client.in_flight


async def test_a_client_that_leaves_a_beam_search_ends_it():
    ended = asyncio.Event()
    async with served() as (engine, port):

        async def beam(prompt, params):
            engine.hold = True
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        engine.client.beam = beam  # type: ignore[method-assign]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": [1], "beam_width": 2}))
        await until(lambda: engine.hold)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_client_that_leaves_before_its_request_is_whole_costs_nothing():
    async with served() as (engine, port):
        for cut in (20, -1):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("/v1/completions", {"prompt": [1]})[:cut])
            await asyncio.sleep(0.02)
            writer.transport.abort()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": [1]}))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert len(engine.sent) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_dropped_and_holds_nobody_up(stream):
    tokens = 10**6 if stream else 4000
    body = {"prompt": [1], "max_tokens": tokens, "logprobs": 5, "stream": stream}
    make, limits = partial(FakeEngine, info=LONG), Limits(write_seconds=0.3)
    async with served(make, limits=limits) as (engine, port):
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(request("/v1/completions", body))
        await until(lambda: engine.running)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": [2], "max_tokens": 50}))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: not engine.running)
        assert len(engine.aborted) == stream
        writer.close()
        await until(lambda: not servers[-1].server_state.connections)
        stalled.close()


@pytest.mark.parametrize("framing", ["Content-Length: 1000000000\r\n", ""])
async def test_a_client_that_sends_too_much_reads_why_while_it_sends(framing):
    async with served(limits=Limits(body_bytes=10**5)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        framing_line = framing or "Transfer-Encoding: chunked\r\n"
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}{framing_line}\r\n".encode())
        piece = b"x" * 2**16
        for _ in range(20):
            writer.write(piece if framing else b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        told = await reader.readuntil(b"}}")
        assert b"connection: close" in told.lower()
        writer.close()


async def test_a_long_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(responses, "QUIET_SECONDS", 0.04)
    body = {"messages": HELLO, "max_tokens": 3, "stream": True}
    async with served() as (engine, port):
        for ends in ("[DONE]", "a step failed"):
            engine.hold = True
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("/v1/chat/completions", body))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for _ in range(3):
                await reader.readuntil(b": waiting\n\n")
            engine.hold = False
            if ends != "[DONE]":
                engine.fail(ends)
            assert await reader.readuntil(ends.encode())
            writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 66_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 11_000, b"431"),
        (b"GET /" + b"x" * 66_000, b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: y", b"408"),
        (b"", b"408"),
    ],
    ids=range(9),
)
async def test_what_is_no_request_or_never_becomes_one_is_told_so(data, status):
    seconds = 0.2 if status == b"408" else 30
    async with served(limits=Limits(read_seconds=seconds)) as (_, port):
        for before in (b"", request("/v1/completions", {"prompt": [1]})):
            if before and status == b"408":
                continue
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if before:
                writer.write(before)
                await reader.readuntil(b"}}")
            writer.write(data)
            told = await reader.read()
            writer.close()
            assert told.split()[1] == status
            assert set(json.loads(told.partition(b"\r\n\r\n")[2])) == {"error"}


async def test_a_body_that_does_not_come_is_not_waited_for():
    async with served(limits=Limits(read_seconds=0.05)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": [1]})[:-3])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_connection_is_used_again_after_an_error():
    async with served() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        tries = [
            (b"400", request("/v1/completions", {"prompt": [1], "n": 99})),
            (b"404", request("/nope", {"prompt": "a" * 10**5})),
            (b"200", request("/v1/completions", {"prompt": [1], "stream": True})),
            (b"200", request("/v1/completions", {"prompt": [1]})),
        ]
        for status, data in tries:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            if b"chunked" in head:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = head.lower().split(b"content-length: ")[1].split()[0]
                await reader.readexactly(int(length))
        writer.close()


@pytest.mark.parametrize("encode", [quote, dumps])
def test_no_text_breaks_a_line(encode):
    text = "".join(map(chr, range(0x100))) + "\u2028\u2029\u6f22"
    line = encode(text)
    assert line.splitlines() == [line]
    assert json.loads(line) == text
