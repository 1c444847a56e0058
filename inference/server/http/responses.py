"""Answers and errors, and noticing that the one who asked has gone.

Errors are as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}. A stream
is sent by hand: one `send` for all produced since the last, no task or queue between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from json.encoder import encode_basestring
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
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


def api_error(error: ApiError | PTQError) -> ApiError:
    """The answer for an error of ours; what is no fault of the request tells no internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        seconds = error.retry_after
        headers = {"Retry-After": f"{seconds}", "Retry-After-Ms": f"{seconds * 1000}"}
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param, "invalid_value")
    return ApiError(500, str(error), code="engine_error")


class Json(Response):
    """An object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        return dumps(content).encode()


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
    left, more = LINGER_BYTES, True
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and more:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Value]) -> Value:
    """What `work` gives; it is cancelled as soon as the client goes away.

    Raises:
        ClientDisconnect: it went.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class EventStream(StreamingResponse):
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
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._frames, self._write_seconds = frames, write_seconds
        self._done, self._quiet = done, quiet
        self._begun = self._over = False
        self._last, self._waits = 0.0, False  # when a write began last; it is not through
        self._log: dict[str, Any] = {}  # what the request's line in the log says

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        task, self._last = asyncio.current_task(), asyncio.get_running_loop().time()
        assert task is not None
        self._log = scope.get("state", {}).get("log", self._log)
        watch = asyncio.ensure_future(self._watch(receive, send))
        watch.add_done_callback(lambda watch: watch.cancelled() or self._over or task.cancel())
        try:
            async with aclosing(self._frames):
                await self.stream_response(send)
        except asyncio.CancelledError:
            if not watch.done():
                raise
            task.uncancel()
            raise ClientDisconnect from None
        finally:
            self._over = True
            watch.cancel()

    async def stream_response(self, send: Send) -> None:
        """Send it all; the head goes with the first frame, what fails before is a status."""
        try:
            async for frame in self._frames:
                await self._write(send, frame)
        except Exception as error:  # the boundary of a request: its stream ends with an event
            if not self._begun:
                raise
            if not isinstance(error, ApiError | PTQError):  # which tells a client no internals
                LOG.error("a defect ended a stream", exc_info=error)
                error = ApiError(500, DEFECT)
            answer = api_error(error)
            self._log["error"] = answer.status  # the line has that of the head, 200
            content = json.dumps(answer.content)
            await self._write(send, f"data: {content}\n\n".encode())
        await self._write(send, self._done, more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send some of it, with the head if it is the first."""
        self._last, self._waits = asyncio.get_running_loop().time(), True
        if not self._begun:
            self._begun = True
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._waits = False

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Wait until the client has gone, or reads nothing for too long; fill long silences.

        It looks now and then, which costs a frame nothing.
        """
        loop, gone = asyncio.get_running_loop(), False
        while not gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._write_seconds, QUIET_SECONDS) / 4):
                    gone = (await receive())["type"] == "http.disconnect"
            silent = loop.time() - self._last
            if self._waits:
                gone = gone or silent > self._write_seconds
            elif self._quiet and silent > QUIET_SECONDS:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._write_seconds):
                        await self._write(send, self._quiet)
