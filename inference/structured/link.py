"""The engine's end of the connection to the process that compiles constraints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

from formats.errors import RequestError
from inference.requests.constraint import Constraint
from inference.structured.helper import Answer, Bounds

Compiled = tuple[Any, int]  # xgrammar's, and its bytes as JSON


class HelperLink:
    """A helper process, from its start to its end; `inference.structured.helper` is the other side.

    Args:
        info: xgrammar's view of the tokenizer.
        bounds: What a constraint may take.

    Attributes:
        process: The helper.
    """

    def __init__(self, info: Any, bounds: Bounds) -> None:
        self._info, self._lock = info, Lock()
        self._asked: dict[int, Future[Compiled]] | None = {}  # None once it has ended
        self._number = 0
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(self._socket.dup().detach())
        paths = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inference.structured.helper", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine, with which it ends
            )
        self._connection.send((info.serialize_json(), bounds))
        Thread(target=self._receive, name="constraints", daemon=True).start()

    def ask(self, constraint: Constraint) -> Future[Compiled]:
        """Have a constraint compiled.

        Raises:
            OSError: the process has ended.
        """
        future: Future[Compiled] = Future()
        with self._lock:
            if self._asked is None:
                raise BrokenPipeError("the process that compiles constraints has ended")
            self._number += 1
            self._asked[self._number] = future
        self._connection.send((self._number, constraint.kind, constraint.plain))
        return future

    def close(self) -> None:
        """End the connection, and with it the process."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """Take answers until the process ends."""
        with suppress(EOFError, OSError):
            while True:
                self._take(self._connection.recv())
        self.process.wait()
        with self._lock:
            asked, self._asked = self._asked or {}, None
        for future in asked.values():
            future.set_exception(refused("the process that compiles it has ended; ask again"))

    def _take(self, answer: Answer) -> None:
        import xgrammar

        number, text, refusal = answer
        with self._lock:
            future = (self._asked or {}).pop(number)
        if text is None:
            future.set_exception(refused(str(refusal)))
        else:
            try:
                compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
            except RuntimeError as error:
                future.set_exception(refused(str(error)))
            else:
                future.set_result((compiled, len(text)))


def refused(reason: str) -> RequestError:
    """A constraint cannot be used, for a reason."""
    return RequestError(f"constraint: {reason}", "constraint")
