"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from formats.errors import PTQError, RequestError
from inference.server.engine_client import Overloaded, Unavailable

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: Of HTTP.
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


def api_error(error: PTQError) -> ApiError:
    """The answer for an error of ours; what is no fault of the request tells no internals."""
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
