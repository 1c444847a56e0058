"""The engine process's end of the socket between the two processes: it never waits to be read.

A message is four bytes, its length, and its pickle: both ends are ours, and nobody else has them.
"""

from __future__ import annotations

import pickle
import selectors
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Any

from inference.server.messages import FromEngine, Step, ToEngine

LENGTH = Struct("!I")
PART = 2**18  # bytes that are read at once


def frame(message: Any) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


class Unframer:
    """Messages out of bytes that come in any parts."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes."""
        self._bytes += data
        start = 0
        while len(self._bytes) >= start + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._bytes, start)
            end = start + LENGTH.size + size
            if len(self._bytes) < end:
                break
            yield pickle.loads(self._bytes[start + LENGTH.size : end])
            start = end
        del self._bytes[:start]


class HttpGone(Exception):  # noqa: N818 (of no interest to a user, who ended it)
    """The HTTP process has ended, or closed the socket."""


class Channel:
    """Messages from and to the HTTP process.

    What it does not read waits here, and steps that wait become one: what a slow HTTP process
    costs the engine is memory for the tokens of the requests that it asked for.

    Args:
        end: A stream socket, taken over.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket, self._unframer = end, Unframer()
        self._messages: deque[FromEngine] = deque()
        self._unsent = memoryview(b"")
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)

    def receive(self, *, wait: bool, seconds: float | None = None) -> list[ToEngine]:
        """All messages that are there; with `wait`, at least one, unless none comes for `seconds`.

        Raises:
            HttpGone: none will come.
        """
        while True:
            unsent = self._flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wait and unsent else 0)
            self._selector.modify(self._socket, events)
            ready = self._selector.select(seconds if wait else 0)
            readable = any(found & selectors.EVENT_READ for _, found in ready)
            messages = list(self._read()) if readable else []
            if messages or not wait or not ready:
                return messages

    def send(self, message: FromEngine) -> None:
        """Send a message as soon as the other side takes it; at once, where nothing waits.

        Raises:
            HttpGone: nobody will take it.
        """
        last = self._messages[-1] if self._messages else None
        if isinstance(message, Step) and isinstance(last, Step):
            last.merge(message)
        else:
            self._messages.append(message)
        self._flush()

    def close(self, last: FromEngine | None, seconds: float) -> None:
        """Send what waits and a last message, for so many seconds at most; close the socket."""
        self._socket.settimeout(seconds)
        messages = [*self._messages] if last is None else [*self._messages, last]
        with suppress(OSError):  # the other side is gone, or does not read
            self._socket.sendall(bytes(self._unsent) + b"".join(map(frame, messages)))
        self._selector.close()
        self._socket.close()

    def _read(self) -> Iterator[ToEngine]:
        while True:
            try:
                data = self._socket.recv(PART)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                raise HttpGone
            yield from self._unframer.feed(data)

    def _flush(self) -> bool:
        """Send what the other side takes now; whether anything is left."""
        while self._unsent or self._messages:
            if not self._unsent:
                self._unsent = memoryview(frame(self._messages.popleft()))
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return True
            except ConnectionError as error:
                raise HttpGone from error
            self._unsent = self._unsent[sent:]
        return False
