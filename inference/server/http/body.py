"""Reading a body: bounded in bytes and in time, strict JSON in UTF-8, then a strict model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from email.message import Message
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from formats.errors import suggestion
from inference.server.http.responses import ApiError, ClientGoneError
from inference.server.settings import Limits

Body = TypeVar("Body", bound=BaseModel)
AT_ONCE = 2**16  # bytes that are parsed on the event loop; more go to a thread
DEEPEST = 200  # objects and lists in one another, of which `from_json` reads no more
SHOWN = 80  # characters of a wrong value that an error repeats


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """The body of a request as a checked model.

    Raises:
        ApiError: 400 for what is no JSON or no such model, 408, 413 or 415.
        ClientGoneError: the client left before all had come.
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
        message = f"the body is {_kind(raw)}; an object is needed, such as {{...}}"
        raise ApiError(400, message, code="invalid_json")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _refusal(error, raw, model) from error


def _check_type(request: Request) -> None:
    """JSON only: also because a foreign web page can send other types without being asked."""
    header = request.headers.get("content-type", "")
    message = Message()
    message["content-type"] = header
    kind = message.get_content_type() if header else "none"
    if kind != "application/json" and not kind.endswith("+json"):
        reason = f"Content-Type is {kind}; send the header `Content-Type: application/json`"
        raise ApiError(415, reason)
    charset = message.get_content_charset("utf-8")
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
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        data += message.get("body", b"")
        if len(data) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return data


def _too_large(most: int) -> ApiError:
    message = f"the body has more than {most} bytes, the most that this server reads"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


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
    reason = fault["msg"].removeprefix("Input ").removeprefix("Value error, ")
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


def _kind(raw: Any) -> str:
    names = {str: "a text", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(raw), "a number")
