"""Compiles constraints off the engine's thread and out of its process, and keeps the results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any
from weakref import finalize, ref

from formats.errors import RequestError
from inference.scheduling.active import MakeMatcher
from inference.scheduling.constraint import Constraint
from inference.structured.helper import Answer, Bounds
from inference.structured.matcher import GrammarMatcher

MOST_KEPT = 64  # compiled grammars
MOST_BYTES = 256 << 20  # of them together, as JSON
INSTALL = "pip install 'ptq[structured]'"


class GrammarCompiler:
    """Makes matchers for an engine's requests.

    `inference.structured.helper` compiles, in a process that starts with the first constraint and
    ends with this one. Nothing here waits for it but threads of its own.

    Args:
        tokenizer: A transformers tokenizer, byte-level or SentencePiece.
        vocabulary: Tokens of the model, ids that stand for nothing included.
        ends: The model's end tokens.
        bounds: What a constraint may take.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, ends: Set[int], bounds: Bounds | None = None
    ) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._bounds = bounds or Bounds()
        self._kept: OrderedDict[Constraint, tuple[MakeMatcher, int]] = OrderedDict()
        self._asked: dict[int, tuple[Constraint, Future[MakeMatcher]]] = {}
        self._lock, self._number = Lock(), 0
        self._sender = ThreadPoolExecutor(1, "constraints")
        self._connection: Connection | None = None
        self._info: Any = None

    def compile(self, constraint: Constraint) -> Future[MakeMatcher]:
        """What makes matchers of a constraint, perhaps at once; or a RequestError that refuses it.

        Raises:
            RequestError: xgrammar is not installed.
        """
        if find_spec("xgrammar") is None:
            raise RequestError(
                f"constraint: needs xgrammar, which is not installed; {INSTALL}", "constraint"
            )
        future: Future[MakeMatcher] = Future()
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                future.set_result(self._kept[constraint][0])
                return future
            self._number += 1
            self._asked[self._number] = constraint, future
            self._sender.submit(self._send, self._number, constraint)
        return future

    def _send(self, number: int, constraint: Constraint) -> None:
        try:
            if self._connection is None:
                self._connection = self._start()
            self._connection.send((number, constraint.kind, constraint.text))
        except Exception as error:  # whatever keeps it from starting, requests are to be told
            self._lose(f"the process that compiles constraints cannot be used: {error}")

    def _start(self) -> Connection:
        """Start the helper, and a thread that takes its answers."""
        if self._info is None:
            self._info = tokenizer_info(self._tokenizer, self._vocabulary, self._ends)
        ours, theirs = socket.socketpair()
        finalize(self, _hang_up, ours.dup())
        paths = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "inference.structured.helper", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine, with which it ends
            )
        connection = Connection(ours.detach())
        connection.send((self._info.serialize_json(), self._bounds))
        Thread(target=_receive, args=(ref(self), connection), name="grammars", daemon=True).start()
        return connection

    def ended(self) -> None:
        """The helper has ended; the next constraint starts another."""
        self._connection = None
        self._lose("the process that compiles constraints has ended; ask again")

    def take(self, answer: Answer) -> None:
        """Take an answer of the helper."""
        import xgrammar

        number, text, refusal = answer
        with self._lock:
            constraint, future = self._asked.pop(number)
        if text is None:
            future.set_exception(RequestError(f"constraint: {refusal}", "constraint"))
            return
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        make = partial(GrammarMatcher, compiled, -(-self._vocabulary // 32), self._ends)
        with self._lock:
            self._kept[constraint] = make, len(text)
            while len(self._kept) > 1 and self._full():
                self._kept.popitem(last=False)
        future.set_result(make)

    def _full(self) -> bool:
        held = sum(nbytes for _, nbytes in self._kept.values())
        return len(self._kept) > MOST_KEPT or held > MOST_BYTES

    def _lose(self, reason: str) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
        for _, future in asked.values():
            future.set_exception(RequestError(f"constraint: {reason}", "constraint"))


def _receive(compiler: ref[GrammarCompiler], connection: Connection) -> None:
    """Pass a helper's answers on for as long as both live."""
    while True:
        try:
            answer: Answer | None = connection.recv()
        except (EOFError, OSError):
            answer = None
        owner = compiler()
        if owner is None:
            return
        if answer is None:
            owner.ended()
            return
        owner.take(answer)
        del owner


def _hang_up(connection: socket.socket) -> None:
    """End a connection, also for a thread that waits for it; the helper then ends."""
    with connection, suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def tokenizer_info(tokenizer: Any, vocabulary: int, ends: Set[int]) -> Any:
    """xgrammar's view of a tokenizer.

    Without end tokens one that never comes stands for them, an id beyond the vocabulary.
    """
    import xgrammar

    size = vocabulary if ends else vocabulary + 1
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=size, stop_token_ids=sorted(ends) or [vocabulary]
    )
