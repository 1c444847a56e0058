"""Answers and errors, and noticing that the one who asked has gone.

Errors are as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}. A stream
is sent by hand: one `send` for all produced since the last, no task or queue between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from formats.errors import PTQError, RequestError
from inference.server.engine_client import Overloaded, Unavailable

Value = TypeVar("Value")
LOG = logging.getLogger("ptq.serve")
DEFECT = "the server met a defect of its own; its log tells more"
QUIET_SECONDS = 15.0  # proxies take a connection for dead after 60, often
LINGER_SECONDS, LINGER_BYTES = 2.0, 2**26  # of a refused body that are still read away
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
LINE_ENDS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})


def dumps(content: Any) -> str:
    """JSON as compact as it gets; a number that is not finite is a defect."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return in_one_line(text)


def in_one_line(text: str) -> str:
    """JSON without what a client may take for a line's end: Unicode has more than JSON escapes."""
    return text if text.isascii() else text.translate(LINE_ENDS)


def quote(text: str) -> str:
    """A text as JSON."""
    return in_one_line(encode_basestring(text))


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: What was found, what is allowed, how to fix it.
        param: The field of the body that is at fault, if one is.
        code: A word for programs.
        headers: Beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    @property
    def frame(self) -> bytes:
        """The error as an event of a stream that has begun."""
        return b"data: " + json.dumps(self.content).encode() + b"\n\n"


class ClientGoneError(Exception):
    """The client has gone away: there is no one to answer."""


def api_error(error: ApiError | PTQError) -> ApiError:
    """The answer for an error of ours; what is no fault of the request tells no internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        seconds = error.retry_after
        headers = {
            "Retry-After": str(max(1, round(seconds))),
            "Retry-After-Ms": str(max(1, round(seconds * 1000))),
        }
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param, "invalid_value")
    return ApiError(500, str(error), code="engine_error")


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
    """Frames of server-sent events, sent as they come.

    Args:
        frames: Bytes of one event or of several. What it raises before the answer has begun is an
            answer of its own, later an event. It is closed when the client goes, or reads nothing
            for too long.
        write_seconds: How long one frame may wait for the client.
        done: What is sent at the end.
        quiet: What is sent after no output for `QUIET_SECONDS`, so that nobody between here and
            the client takes the connection for dead.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes, None], write_seconds: float, done: bytes, quiet: bytes
    ) -> None:
        self.status_code, self.background = 200, None
        self.media_type, self.body = "text/event-stream", b""
        self._frames, self._write_seconds = frames, write_seconds
        self._done, self._quiet = done, quiet
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        writer = _Writer(send, self.raw_headers, self._write_seconds, self._quiet)
        watch = asyncio.ensure_future(_gone(receive))
        watch.add_done_callback(lambda watch: watch.cancelled() or writer.stop())
        try:
            async with aclosing(self._frames):
                await self._send(writer)
        except asyncio.CancelledError:
            if not (watch.done() or writer.stalled):
                raise
            writer.task.uncancel()
            raise ClientGoneError from None
        finally:
            writer.close()
            watch.cancel()

    async def _send(self, writer: _Writer) -> None:
        """Send it all; the head goes with the first frame, what fails before is a status."""
        try:
            async for frame in self._frames:
                await writer.write(frame)
        except Exception as error:  # the boundary of a request: its stream ends with an event
            if not writer.begun:
                raise
            if not isinstance(error, ApiError | PTQError):  # which tells a client no internals
                LOG.error("a defect ended a stream", exc_info=error)
                error = ApiError(500, DEFECT)
            await writer.write(api_error(error).frame)
        await writer.write(self._done, more=False)


class _Writer:
    """Sends; cancels the task whose client reads nothing, and fills long silences.

    A timer looks now and then, which costs a frame nothing.

    Attributes:
        task: Whoever made it.
        stalled: Whether the client reads nothing.
    """

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], seconds: float, quiet: bytes
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, self.begun, self.stalled = task, False, False
        self._send, self._headers, self._seconds, self._quiet = send, headers, seconds, quiet
        self._loop, self._over = asyncio.get_running_loop(), False
        self._last, self._waits = self._loop.time(), False  # of the last write; it is not through
        self._filling: asyncio.Task[None] | None = None
        self._period = min(seconds, QUIET_SECONDS) / 4
        self._timer = self._loop.call_later(self._period, self._look)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send some of it, with the head if it is the first."""
        self._last, self._waits = self._loop.time(), True
        if not self.begun:
            self.begun = True
            head = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._waits = False

    def _look(self) -> None:
        silent = self._loop.time() - self._last
        if self._waits and silent > self._seconds:
            self.stalled = True
            self.stop()
            return
        if self._quiet and not self._waits and silent > QUIET_SECONDS:
            self._filling = self._loop.create_task(self.write(self._quiet))
        self._timer = self._loop.call_later(self._period, self._look)

    def stop(self) -> None:
        """Cancel the task, unless all is sent."""
        if not self._over:
            self.task.cancel()

    def close(self) -> None:
        """All is sent, or nothing more will be."""
        self._over = True
        self._timer.cancel()
        if self._filling is not None:
            self._filling.cancel()
