"""What every request passes on its way in: its line in the log, a proxy's prefix, then the key."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import uuid

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.http.responses import DEFECT, LOG, ApiError, ClientGoneError, Refusal
from inference.server.metrics import Metrics

OPEN_PATHS = ("/", "/health")  # need no key: the page holds nothing, and says how to give one
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestLog:
    """Names a request, answers where a defect kept others from it, and tells of it at its end.

    Handlers put what the line shall tell into `scope["state"]["log"]`.

    Args:
        metrics: Counts it.
        log_requests: Log a line a request; what fails is logged in any case.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, *, log_requests: bool, log_texts: bool
    ) -> None:
        self._app, self._metrics = app, metrics
        self._log, self._log_texts = log_requests, log_texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)
        scope.setdefault("state", {})["log"] = {}
        if self._log_texts:
            receive, send = _log_bodies(name, receive, send)
        line = _Line(name, send)
        try:
            await self._app(scope, receive, line.send)
        except ClientGoneError:
            line.status = 499  # as nginx logs it; nobody reads it
        except Exception:  # the boundary of a request: a defect of ours must not end the server
            LOG.exception("%s %s %s: a defect", name, scope["method"], scope["path"])
            if line.status:
                raise
            await Refusal(ApiError(500, DEFECT))(scope, receive, line.send)
        finally:
            end = time.perf_counter()
            # the route's template: clients must not be able to make up names of what is counted
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.answered(scope["method"], route, line.status, end - line.begin)
            if self._log:
                line.write(scope, end)


class _Line:
    """What the log tells of a request."""

    def __init__(self, name: str, send: Send) -> None:
        self._name, self._send, self.begin = name, send, time.perf_counter()
        self.status = 0
        self._first = 0.0

    async def send(self, message: Message) -> None:
        """Pass on a part of the answer; its head bears the request's name."""
        if message["type"] == "http.response.start":
            self.status, self._first = message["status"], time.perf_counter()
            header = (b"x-request-id", self._name.encode())
            message["headers"] = [*message.get("headers", ()), header]
        await self._send(message)

    def write(self, scope: Scope, end: float) -> None:
        """Log it; what a client chose, such as the path, cannot make a line of its own."""
        asked = f"{self._name} {scope['method']} {repr(scope['path'])[1:-1]} {self.status}"
        first, whole = (self._first or end) - self.begin, end - self.begin
        details = "".join(f" {key}={value}" for key, value in scope["state"]["log"].items())
        LOG.info("%s first=%.4fs all=%.4fs%s", asked, first, whole, details)


def _log_bodies(name: str, receive: Receive, send: Send) -> tuple[Receive, Send]:
    def logged(message: Message, what: str) -> Message:
        if message.get("body"):
            LOG.info("%s %s %r", name, what, message["body"])
        return message

    async def logged_receive() -> Message:
        return logged(await receive(), "asks")

    async def logged_send(message: Message) -> None:
        await send(logged(message, "is answered"))

    return logged_receive, logged_send


def _request_id(scope: Scope) -> str:
    """The client's own name for the request, where it is fit for a log, or a new one."""
    for key, value in scope["headers"]:
        if key == b"x-request-id" and REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return uuid.uuid4().hex


class RootPath:
    """Answers below a prefix as without it, for proxies that leave theirs on.

    The prefix alone leads to the page, whose own links are relative and need the slash at its end.

    Args:
        prefix: Such as `/llm`.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] == "http" and scope["path"] == self._prefix:
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope["path"] = scope["path"].removeprefix(self._prefix)
        await self._app(scope, receive, send)


class KeyCheck:
    """Lets in who shows the key, `Authorization: Bearer KEY`; compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._fits(scope):
            await self._app(scope, receive, send)
            return
        message = "this server needs its key: send the header `Authorization: Bearer KEY`"
        headers = {"WWW-Authenticate": "Bearer"}
        error = ApiError(401, message, code="invalid_api_key", headers=headers)
        await Refusal(error)(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        shown = [value for key, value in scope["headers"] if key == b"authorization"]
        kind, _, key = (shown[0] if len(shown) == 1 else b"").partition(b" ")
        return kind.lower() == b"bearer" and secrets.compare_digest(_digest(key), self._key)


def _digest(key: bytes) -> bytes:
    """Of equal length for any key, so that the time of a comparison does not tell even that."""
    return hashlib.sha256(key.strip()).digest()
