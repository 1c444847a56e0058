"""Answers, and noticing that the one who asked has gone.

A stream is sent by hand: one `send` for all that came since the last, no task or queue between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from formats.errors import PTQError
from inference.server.http.errors import ApiError, ClientGoneError, api_error

Value = TypeVar("Value")
LOG = logging.getLogger("ptq.serve")
DEFECT = "the server met a defect of its own; its log tells more"
LINGER_SECONDS, LINGER_BYTES = 2.0, 2**26  # of a refused body that are still read away


def dumps(content: Any) -> str:
    """JSON as compact as it gets; a number that is not finite is a defect."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Json(Response):
    """An object as JSON."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(dumps(content).encode(), status, headers)


class Refusal(Json):
    """An error.

    Where the connection ends with it, what the client still sends is read away for a while: a
    client that writes on would otherwise meet a closed connection, and never read why.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.content, error.status, error.headers)
        self._closes = "Connection" in error.headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if not self._closes:
            await super().__call__(scope, receive, send)
            return
        head = {"type": "http.response.start", "status": self.status_code}
        await send(head | {"headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _read_away(receive)
        await send({"type": "http.response.body", "body": b""})


async def _read_away(receive: Receive) -> None:
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """What `work` gives; it is cancelled as soon as the client goes away.

    Raises:
        ClientGoneError: it went.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class EventStream(Response):
    """Frames of server-sent events, sent as they come; ends with `data: [DONE]`.

    Args:
        frames: Bytes of one event or of several. What it raises before the first is an answer of
            its own, later an event. It is closed when the client goes, or reads nothing for too
            long.
        write_seconds: How long one frame may wait for the client.
        done: What is sent at the end.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        write_seconds: float,
        *,
        media_type: str = "text/event-stream",
        done: bytes = b"data: [DONE]\n\n",
    ) -> None:
        self.status_code, self.background = 200, None
        self.media_type, self.body = media_type, b""
        self._frames, self._write_seconds, self._done = frames, write_seconds, done
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(_gone(receive))
        writer = _Writer(send, self._write_seconds, task)
        watch.add_done_callback(lambda watch: watch.cancelled() or writer.stop())
        try:
            async with aclosing(self._frames):
                await self._send(writer)
        except asyncio.CancelledError:
            if not (watch.done() or writer.stalled):
                raise
            task.uncancel()
            raise ClientGoneError from None
        finally:
            writer.close()
            watch.cancel()

    async def _send(self, writer: _Writer) -> None:
        """Send it all; the head goes with the first frame, what fails before is a status."""
        begun = False
        try:
            async for frame in self._frames:
                if not begun:
                    head = {"type": "http.response.start", "status": 200}
                    await writer.write(head | {"headers": self.raw_headers})
                    begun = True
                await writer.body(frame)
        except Exception as error:  # the boundary of a request: its stream ends with an event
            if not begun:
                raise
            await writer.body(_told(error).frame)
        await writer.body(self._done, more=False)


def _told(error: Exception) -> ApiError:
    """What a client is told of an error; a defect of ours is logged, and told without internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PTQError):
        return api_error(error)
    LOG.error("a defect ended a stream", exc_info=error)
    return ApiError(500, DEFECT)


class _Writer:
    """Sends, and cancels the task whose client has read nothing for too long.

    A timer that looks now and then costs a frame nothing.
    """

    def __init__(self, send: Send, seconds: float, task: asyncio.Task[Any]) -> None:
        self._send, self._seconds, self._task = send, seconds, task
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the write that still waits began
        self.stalled = self._over = False
        self._timer = self._loop.call_later(seconds / 4, self._look)

    async def body(self, data: bytes, *, more: bool = True) -> None:
        await self.write({"type": "http.response.body", "body": data, "more_body": more})

    async def write(self, message: Message) -> None:
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since > self._seconds:
            self.stalled = True
            self.stop()
            return
        self._timer = self._loop.call_later(self._seconds / 4, self._look)

    def stop(self) -> None:
        """Cancel the task, unless all is sent."""
        if not self._over:
            self._task.cancel()

    def close(self) -> None:
        self._over = True
        self._timer.cancel()
