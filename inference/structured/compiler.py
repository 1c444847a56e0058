"""Compiles constraints off the engine's thread and out of its process, and keeps the results.

`HelperLink` is the engine's end of the connection to the process that compiles them, and
`GrammarMatcher` follows the compiled grammar of one request.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any
from weakref import finalize

import numpy as np

from formats.errors import RequestError
from inference.requests.constraint import Constraint, unusable
from inference.structured.helper import Answer, Bounds

Compiled = tuple[Any, int]  # xgrammar's, and its bytes as JSON
MakeMatcher = Callable[[Sequence[int]], "GrammarMatcher"]
MOST_KEPT = 64  # compiled grammars
MOST_BYTES = 256 << 20  # of them together, as JSON
INSTALL = "pip install 'ptq[structured]'"


class HelperLink:
    """A helper process; `inference.structured.helper` is the other side of the connection."""

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
            future.set_exception(unusable("the process that compiles it has ended; ask again"))

    def _take(self, answer: Answer) -> None:
        import xgrammar

        number, text, refusal = answer
        with self._lock:
            future = (self._asked or {}).pop(number)
        if text is None:
            future.set_exception(unusable(str(refusal)))
        else:
            try:
                compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
            except RuntimeError as error:
                future.set_exception(unusable(str(error)))
            else:
                future.set_result((compiled, len(text)))


class GrammarCompiler:
    """Makes matchers for an engine's requests.

    `inference.structured.helper` compiles, in a process that starts with the first constraint and
    ends with this one. Nothing here waits for it but threads of its own.

    Args:
        tokenizer: A transformers tokenizer, byte-level or SentencePiece.
        vocabulary: Tokens of the model, ids that stand for nothing included.
        bounds: What a constraint may take.

    Attributes:
        link: To the helper, once it was started.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, ends: Set[int], bounds: Bounds | None = None
    ) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._bounds, self._info = bounds or Bounds(), None
        self._kept: OrderedDict[Constraint, tuple[MakeMatcher, int]] = OrderedDict()
        self._coming: dict[Constraint, Future[MakeMatcher]] = {}
        self._lock, self._sender = Lock(), ThreadPoolExecutor(1, "constraints")
        self.link: HelperLink | None = None

    def compile(self, constraint: Constraint) -> Future[MakeMatcher]:
        """What makes matchers of a constraint, perhaps at once; or a RequestError that refuses it.

        Raises:
            RequestError: xgrammar is not installed.
        """
        if find_spec("xgrammar") is None:
            raise unusable(f"it needs xgrammar, which is not installed; {INSTALL}")
        future: Future[MakeMatcher] = Future()
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                future.set_result(kept[0])
                return future
            coming = self._coming.setdefault(constraint, future)
        if coming is not future:  # another request has asked for the same
            return coming
        future.add_done_callback(lambda _: self._coming.pop(constraint))
        self._sender.submit(self._send, constraint, future)
        return future

    def _send(self, constraint: Constraint, future: Future[MakeMatcher]) -> None:
        try:
            try:
                asked = self._start_link().ask(constraint)
            except OSError:  # it has ended since the last one
                self.link = None
                asked = self._start_link().ask(constraint)
            asked.add_done_callback(partial(self._keep, constraint, future))
        except Exception as error:  # whatever keeps it from starting, the request gets the error
            future.set_exception(unusable(f"nothing compiles it here: {error}"))

    def _start_link(self) -> HelperLink:
        if self._info is None:
            self._info = tokenizer_info(self._tokenizer, self._vocabulary, self._ends)
        if self.link is None:
            self.link = HelperLink(self._info, self._bounds)
            finalize(self, self.link.close)
        return self.link

    def _keep(
        self, constraint: Constraint, future: Future[MakeMatcher], asked: Future[Compiled]
    ) -> None:
        """Keep what was compiled, and pass it on."""
        error = asked.exception()
        if error is not None:
            future.set_exception(error if isinstance(error, RequestError) else unusable(str(error)))
            return
        compiled, nbytes = asked.result()
        make = partial(GrammarMatcher, compiled, -(-self._vocabulary // 32), self._ends)
        with self._lock:
            self._kept[constraint] = make, nbytes
            held = sum(each for _, each in self._kept.values())
            while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or held > MOST_BYTES):
                held -= self._kept.popitem(last=False)[1][1]
        future.set_result(make)


def tokenizer_info(tokenizer: Any, vocabulary: int, ends: Set[int]) -> Any:
    """xgrammar's view of a tokenizer.

    Without end tokens one that never comes stands for them, an id beyond the vocabulary.
    """
    import xgrammar

    size = vocabulary if ends else vocabulary + 1
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=size, stop_token_ids=sorted(ends) or [vocabulary]
    )


class GrammarMatcher:
    """Follows one output under a compiled grammar.

    Args:
        words: Of a mask: ceil(vocabulary / 32).
        stops: Tokens that end this output beside them. Those that are no text come where it may
            end; the others are text as well.

    Attributes:
        done: Whether the text is complete, and nothing but its end may come.
    """

    def __init__(
        self, compiled: Any, words: int, ends: Set[int], stops: Sequence[int] = ()
    ) -> None:
        import xgrammar

        info = compiled.tokenizer_info
        ends = ends | ({*stops} & {*info.special_token_ids} if stops else set())
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=sorted(ends) or list(info.stop_token_ids)
        )
        self._filled = np.zeros((1, -(-info.vocab_size // 32)), dtype=np.int32)
        self._ends = np.zeros(words, dtype=np.int32)
        for token in ends:
            self._ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._words, self.done = words, False
        self._fill()

    def accept(self, token: int) -> bool:
        """Take the next token; False where it does not match, or no text goes on with it."""
        if not self._matcher.accept_token(token):
            return False
        if self._matcher.is_terminated():
            self.done = True
            return True
        self._fill()
        return not self.done or self._matcher.is_completed()

    def mask(self, *, ends: bool = True) -> np.ndarray:
        """Which tokens may come, int32 [ceil(vocabulary / 32)], bit i % 32 of word i // 32.

        Args:
            ends: Whether end tokens may, if there are others.
        """
        return self._allowed(self._filled, ends=ends)

    def masks_behind(self, drafts: Sequence[int], ends: Sequence[bool]) -> list[np.ndarray]:
        """Which tokens may come next, and after each of some drafts, as if these had come.

        Args:
            drafts: One token after the other. After the first that may not come, where nothing
                counts, masks are those before it.
            ends: As `ends` of `mask`, for each of them.

        Returns:
            As `mask`, one more than there are drafts.
        """
        masks, filled, taken = [self.mask(ends=ends[0])], self._filled.copy(), 0
        for token, may_end in zip(drafts, ends[1:], strict=True):
            going = taken == len(masks) - 1 and not self._matcher.is_terminated()
            if going and self._matcher.accept_token(token):
                taken += 1
                if not self._matcher.is_terminated():
                    self._matcher.fill_next_token_bitmask(filled)
            masks.append(self._allowed(filled, ends=may_end).copy())
        if taken:
            self._matcher.rollback(taken)
        return masks

    def _allowed(self, filled: np.ndarray, *, ends: bool) -> np.ndarray:
        allowed = filled[0, : self._words]
        others = allowed & ~self._ends
        return allowed if ends or not others.any() else others

    def _fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._filled)
        self.done = not (self._filled[0, : self._words] & ~self._ends).any()
