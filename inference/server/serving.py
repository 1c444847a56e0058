"""The HTTP process while it serves: the first signal drains it, the second ends it at once.

A connection is uvicorn's, with limits on what comes before a request is one. The application bounds
bodies; a line and headers that never end, or that never come, are bounded here. What is no HTTP is
answered by an error object, as everything else is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from formats.errors import EngineError
from inference.server.engine.process import EngineProcess
from inference.server.engine_client import Unavailable
from inference.server.fleet import ServedEngine
from inference.server.http.responses import ApiError, dumps
from inference.server.messages import EngineInfo
from inference.server.settings import Limits

GRACE = 1.0  # seconds for which health still tells that the engine is dead
LAST_BYTES = 5  # seconds in which clients have to take the end of what they were answered
IDLE = 75  # seconds of a connection between requests; clients that keep one for long close it first
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    Args:
        limits: What is read, and how long it is waited for; other arguments are uvicorn's.
    """

    def __init__(self, *args: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._head: int | None = 0  # bytes of a line and headers that are not all there
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        """A client connected."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # For what is sent without the application, such as the rest of a long answer.
            timeout = round(self._limits.write_seconds * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > self._limits.header_bytes:
                message = f"line and headers have more than {self._limits.header_bytes} bytes"
                self._refuse(ApiError(431, message))

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        super().on_message_begin()
        if self._head is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Its line and its headers are there."""
        self._have_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """This is no HTTP."""
        self._refuse(ApiError(400, f"this is no HTTP request: {msg}", code="invalid_http"))

    def _expect_head(self) -> None:
        self._head = 0
        error = ApiError(408, "the request's headers did not come in time")
        self._late = self.loop.call_later(self._limits.read_seconds, self._refuse, error)

    def _have_head(self) -> None:
        self._head = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Tell it and close; not in the middle of an answer to the request before."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                body = dumps(error.content).encode()
                head = f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\n"
                head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()
        self._have_head()


class _Server(uvicorn.Server):
    """A server that leaves signals to us: it would end what runs instead of waiting for it."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


class Serving:
    """An application on a socket before engine processes, until a signal stops it.

    Args:
        listener: A bound socket, taken over.
        processes: Those of its engines, in their order.
        drain_seconds: In which what runs may finish.
        on_ready: Called once the engine is warm.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        client: ServedEngine,
        processes: Sequence[EngineProcess],
        drain_seconds: float,
        on_ready: Callable[[EngineInfo], None],
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http=partial(BoundedProtocol, limits=app.state.served.settings.limits),  # pyright: ignore
            lifespan="on",
            ws="none",
            log_level="warning",
            access_log=False,  # the application logs requests
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST_BYTES,
        )
        self._listener, self._client, self._processes = listener, client, processes
        self._drain_seconds, self._on_ready = drain_seconds, on_ready
        self._stopping = False

    def run(self) -> None:
        """Serve until a signal comes and what runs has ended.

        Raises:
            EngineError: an engine could not be loaded, or all died; clients know it.
        """
        before = [signal.getsignal(number) for number in SIGNALS]
        try:
            with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)

    async def _serve(self) -> None:
        client, server, stop = self._client, _Server(self._config), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._on_signal(number, loop, stop))
        for process, engine in zip(self._processes, client.engines, strict=True):
            await process.connect(engine)
        tasks = [
            serving := asyncio.create_task(server.serve(sockets=[self._listener])),
            dead := asyncio.create_task(client.dead()),
            stopped := asyncio.create_task(stop.wait()),
        ]
        greeting = asyncio.create_task(self._greet())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            await client.drain(self._drain_seconds)
        elif dead.done():
            await asyncio.sleep(GRACE)
        server.should_exit = True
        await serving
        for task in (dead, stopped, greeting):
            task.cancel()
        for process in self._processes:
            process.disconnect()
        if client.reason is not None:
            raise EngineError(client.reason)

    async def _greet(self) -> None:
        with suppress(Unavailable):
            info = await self._client.ready()
            gc.collect()
            gc.freeze()  # what is loaded stays: no collection looks at it again
            self._on_ready(info)

    def _on_signal(self, number: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """Drain; where that is under way, end at once."""
        if self._stopping:
            _tell("ended; what ran is lost\n")
            for process in self._processes:
                process.kill()
            os._exit(128 + number)
        self._stopping = True
        _tell(f"stopping: what runs may finish, for {self._drain_seconds:g} s; once more ends it\n")
        loop.call_soon_threadsafe(stop.set)


def _tell(line: str) -> None:
    """Write to standard error where a signal is handled; a full disk there stops no stopping."""
    with suppress(OSError):
        os.write(2, line.encode())  # print is not safe here: it may be what was interrupted
