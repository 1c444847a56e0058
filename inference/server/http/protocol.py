"""HTTP on a connection as uvicorn has it, with limits on what comes before a request is one.

The application bounds bodies; a line and headers that never end, or that never come, are bounded
here. What is no HTTP is told as an error object, as everything else is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inference.server.http.errors import ApiError
from inference.server.http.responses import dumps
from inference.server.settings import Limits

REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def bounded_protocol(limits: Limits) -> Callable[..., BoundedProtocol]:
    """What uvicorn makes for each connection."""
    return partial(BoundedProtocol, limits=limits)


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
        """A client came."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # For what is sent behind the application's back, such as the rest of a long answer.
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
        """What came is no HTTP."""
        self._refuse(ApiError(400, f"this is no HTTP request: {msg}", code="invalid_http"))

    def _expect_head(self) -> None:
        self._head = 0
        self._late = self.loop.call_later(self._limits.read_seconds, self._too_late)

    def _have_head(self) -> None:
        self._head = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._refuse(ApiError(408, "the request's headers did not come in time"))

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
