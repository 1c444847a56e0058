"""The HTTP process while it serves: the first signal drains it, the second ends it at once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn

from formats.errors import EngineError
from inference.server.engine.process import EngineProcess
from inference.server.engine_client import ServedEngine, Unavailable
from inference.server.http.protocol import bounded_protocol
from inference.server.messages import EngineInfo

GRACE = 1.0  # seconds for which health still tells that the engine is dead
LAST_BYTES = 5  # seconds in which clients have to take the end of what they were answered
IDLE = 75  # seconds of a connection between requests; clients that keep one for long close it first
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that leaves signals to us: it would end what runs instead of waiting for it."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


class Serving:
    """An application on a socket before engine processes, until it is told to stop.

    Args:
        app: The ASGI application.
        listener: A bound socket, taken over.
        client: The engines, as the application sees them.
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
            http=bounded_protocol(app.state.served.settings.limits),  # pyright: ignore
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
            EngineError: an engine could not be loaded, or all died; clients have been told.
        """
        before = [signal.getsignal(number) for number in SIGNALS]
        try:
            with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)

    async def _serve(self) -> None:
        client, server, told = self._client, _Server(self._config), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._on_signal(number, loop, told))
        for process, engine in zip(self._processes, client.engines, strict=True):
            await process.connect(engine)
        tasks = [
            serving := asyncio.create_task(server.serve(sockets=[self._listener])),
            dead := asyncio.create_task(client.dead()),
            stopped := asyncio.create_task(told.wait()),
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
        try:
            info = await self._client.ready()
        except Unavailable:
            return
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection looks at it again
        self._on_ready(info)

    def _on_signal(self, number: int, loop: asyncio.AbstractEventLoop, told: asyncio.Event) -> None:
        """Drain; where that is under way, end at once."""
        if self._stopping:
            os.write(2, b"ended; what ran is lost\n")
            for process in self._processes:
                process.kill()
            os._exit(128 + number)
        self._stopping = True
        line = f"stopping: what runs may finish, for {self._drain_seconds:g} s; once more ends it\n"
        os.write(2, line.encode())  # print is not safe here: it may be what was interrupted
        loop.call_soon_threadsafe(told.set)
