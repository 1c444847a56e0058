"""What a request passes on its way in: its line in the log, a proxy's prefix, the key, its body.

A body is bounded in bytes and in time, strict JSON in UTF-8, then a strict model.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Sequence
from email.message import Message as Headers
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from formats.errors import suggestion
from inference.server.http.responses import DEFECT, LOG, ApiError, Refusal
from inference.server.metrics import Metrics
from inference.server.settings import Limits, ServerSettings

OPEN_PATHS = ("/", "/health")  # need no key: the page holds nothing, and says how to give one
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestLog:
    """Names a request, answers where a defect kept others from it, and tells of it at its end.

    Handlers put what the line shall tell into `scope["state"]["log"]`.

    Args:
        metrics: Counts it.
        settings: Tell what is logged; what fails is logged in any case.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, settings: ServerSettings) -> None:
        self._app, self._metrics, self._settings = app, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, begin, status, first = _request_id(scope), time.perf_counter(), 0, 0.0
        scope.setdefault("state", {})["log"] = {}
        if self._settings.log_texts:
            receive, send = _log_bodies(name, receive, send)

        async def send_named(message: Message) -> None:
            nonlocal status, first
            if message["type"] == "http.response.start":
                status, first = message["status"], time.perf_counter()
                header = (b"x-request-id", name.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            status = 499  # as nginx logs it; nobody reads it
        except Exception:  # the boundary of a request: a defect of ours must not end the server
            LOG.exception("%s %s %s: a defect", name, scope["method"], scope["path"])
            if status:
                raise
            await Refusal(ApiError(500, DEFECT))(scope, receive, send_named)
        finally:
            end = time.perf_counter()
            # the route's template: clients must not be able to make up names of what is counted
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.answered(scope["method"], route, status, end - begin)
            if self._settings.log_requests:
                # what a client chose, such as the path, cannot make a line of its own
                asked = f"{name} {scope['method']} {repr(scope['path'])[1:-1]} {status}"
                times = f"first={(first or end) - begin:.4f}s all={end - begin:.4f}s"
                details = "".join(f" {key}={value}" for key, value in scope["state"]["log"].items())
                LOG.info("%s %s%s", asked, times, details)


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


Body = TypeVar("Body", bound=BaseModel)
AT_ONCE = 2**16  # bytes that are parsed on the event loop; more go to a thread
DEEPEST = 200  # objects and lists in one another, of which `from_json` reads no more
SHOWN = 80  # characters of a wrong value that an error repeats


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """The body of a request as a checked model.

    Raises:
        ApiError: 400 for what is no JSON or no such model, 408, 413 or 415.
        ClientDisconnect: the client left before all had come.
    """
    _check_type(request)
    try:
        async with asyncio.timeout(limits.read_seconds):
            data = await _read(request, limits.body_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {limits.read_seconds:g} s; send it again"
        raise ApiError(408, message, headers={"Connection": "close"}) from error
    if len(data) > AT_ONCE:
        return await asyncio.to_thread(parse, data, model)
    return parse(data, model)


def parse(data: bytes | bytearray, model: type[Body]) -> Body:
    """JSON as a checked model.

    Raises:
        ApiError: it is no JSON, or no such model; `param` names the first wrong field.
    """
    try:  # refuses NaN, half surrogates, what is no UTF-8, and nesting of more than 200
        raw = from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        message = f"the body is no JSON in UTF-8: {error}"
        if "recursion limit" in str(error):
            message = (
                f"the body has more than {DEEPEST} objects and lists in one another; flatten it"
            )
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(raw, dict):
        names = {str: "a text", list: "a list", bool: "true or false", type(None): "null"}
        found = names.get(type(raw), "a number")
        message = f"the body is {found}; an object is needed, such as {{...}}"
        raise ApiError(400, message, code="invalid_json")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _refusal(error, raw, model) from error


def _check_type(request: Request) -> None:
    """JSON only: also because a foreign web page can send other types without being asked."""
    header = request.headers.get("content-type", "")
    headers = Headers()
    headers["content-type"] = header
    kind = headers.get_content_type() if header else "none"
    if kind != "application/json" and not kind.endswith("+json"):
        reason = f"Content-Type is {kind}; send the header `Content-Type: application/json`"
        raise ApiError(415, reason)
    charset = headers.get_content_charset("utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"the body's charset is {charset}; utf-8 is needed")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding is {encoding}; send the body as it is")


async def _read(request: Request, most: int) -> bytearray:
    """The bytes, of which never more than `most` are held."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise _too_large(most)
    return data


def _too_large(most: int) -> ApiError:
    message = f"the body has more than {most} bytes, the most that this server reads"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


NOT_OF_JSON = r"^(Input|List|String|Dictionary|Value error,) | after validation"
OBJECT = re.compile(r"a valid dictionary( or (instance of \w+|object to extract fields from))?")


def _refusal(error: ValidationError, raw: Any, model: type[BaseModel]) -> ApiError:
    """The first fault in words, with the field that a client knows."""
    fault = error.errors(include_url=False)[0]
    place = _place(fault["loc"], raw, named=fault["type"] in ("extra_forbidden", "missing"))
    parts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in place]
    param = "".join(parts).removeprefix(".")
    if fault["type"] == "extra_forbidden":
        guess = ""
        if len(place) == 1:
            guess = "; " + suggestion(str(place[0]), model.model_fields)
        message = f"{param}: there is no such field{guess}"
        return ApiError(400, message, param, "unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"{param}: it is missing", param, "missing_required_parameter")
    reason = re.sub(NOT_OF_JSON, "", OBJECT.sub("an object", fault["msg"]))
    found = repr(fault["input"])
    found = found if len(found) <= SHOWN else found[:SHOWN] + " ..."
    message = f"{param or 'the body'}: {reason}; found {found}"
    return ApiError(400, message, param or None, "invalid_value")


def _place(loc: Sequence[int | str], raw: Any, *, named: bool) -> list[int | str]:
    """Where a fault is, without the names that pydantic gives to the kinds of a union.

    Args:
        loc: Where pydantic says.
        raw: The body.
        named: Whether the last name is a field's, even one that is not there.
    """
    place: list[int | str] = []
    for step, name in enumerate(loc):
        known: dict[Any, Any] = dict(enumerate(raw)) if isinstance(raw, list) else {}
        known = raw if isinstance(raw, dict) else known
        if name in known:
            raw = known[name]
            place.append(name)
        elif named and step == len(loc) - 1:
            place.append(name)
    return place
