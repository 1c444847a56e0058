"""What every request passes on its way in: its name and its line in the log, then the key."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from formats.errors import PTQError
from inference.server.http.errors import ApiError, ClientGoneError, api_error
from inference.server.http.responses import Refusal

LOG = logging.getLogger("ptq.serve")
OPEN_PATHS = ("/", "/health")  # need no key: the page holds nothing, and says how to give one
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestLog:
    """Names a request, answers what nobody else answered, and logs a line when it is over.

    Handlers put what the line shall tell into `scope["state"]["log"]`.

    Args:
        app: What answers.
        log_requests: Whether to log; what fails is logged in any case.
    """

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app, self._log = app, log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, begin, status = _request_id(scope), time.perf_counter(), 0
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["log"] = name, {}
        header = (b"x-request-id", name.encode())

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except ClientGoneError:
            status = 499  # as nginx logs it; nobody reads it
        except (ApiError, PTQError) as error:
            told = error if isinstance(error, ApiError) else api_error(error)
            await Refusal(told)(scope, receive, named)
        except Exception:  # the boundary of a request: a defect of ours must not end the server
            LOG.exception("%s %s %s: a defect", name, scope["method"], scope["path"])
            if status:
                raise
            told = ApiError(500, "the server met a defect of its own; its log tells more")
            await Refusal(told)(scope, receive, named)
        finally:
            if self._log:
                told = " ".join(f"{key}={value}" for key, value in state["log"].items())
                ms = (time.perf_counter() - begin) * 1e3
                line = "%s %s %s %d %.1f ms %s"
                LOG.info(line, name, scope["method"], repr(scope["path"])[1:-1], status, ms, told)


def _request_id(scope: Scope) -> str:
    """The client's own name for the request, where it is fit for a log, or a new one."""
    for key, value in scope["headers"]:
        if key == b"x-request-id" and REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return uuid.uuid4().hex


class KeyCheck:
    """Lets in who shows the key, `Authorization: Bearer KEY`; compared in constant time.

    Args:
        app: What answers.
        key: The key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._fits(scope):
            await self._app(scope, receive, send)
            return
        told = "this server needs its key: send the header `Authorization: Bearer KEY`"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, told, code="invalid_api_key", headers=headers)

    def _fits(self, scope: Scope) -> bool:
        shown = [value for key, value in scope["headers"] if key == b"authorization"]
        kind, _, key = (shown[0] if len(shown) == 1 else b"").partition(b" ")
        return kind.lower() == b"bearer" and secrets.compare_digest(_digest(key), self._key)


def _digest(key: bytes) -> bytes:
    """Of equal length for any key, so that the time of a comparison does not tell even that."""
    return hashlib.sha256(key.strip()).digest()
