"""Compiles constraints off the engine's thread and out of its process, and keeps the results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import Any
from weakref import finalize

from formats.errors import RequestError
from inference.requests.constraint import Constraint
from inference.scheduling.active import MakeMatcher
from inference.structured.helper import Bounds
from inference.structured.link import Compiled, HelperLink, refused
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
            raise refused(f"it needs xgrammar, which is not installed; {INSTALL}")
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
        except Exception as error:  # whatever keeps it from starting, the request is to be told
            future.set_exception(refused(f"nothing compiles it here: {error}"))

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
            future.set_exception(error if isinstance(error, RequestError) else refused(str(error)))
            return
        compiled, nbytes = asked.result()
        make = partial(GrammarMatcher, compiled, -(-self._vocabulary // 32), self._ends)
        with self._lock:
            self._kept[constraint] = make, nbytes
            while len(self._kept) > 1 and self._full():
                self._kept.popitem(last=False)
        future.set_result(make)

    def _full(self) -> bool:
        held = sum(nbytes for _, nbytes in self._kept.values())
        return len(self._kept) > MOST_KEPT or held > MOST_BYTES


def tokenizer_info(tokenizer: Any, vocabulary: int, ends: Set[int]) -> Any:
    """xgrammar's view of a tokenizer.

    Without end tokens one that never comes stands for them, an id beyond the vocabulary.
    """
    import xgrammar

    size = vocabulary if ends else vocabulary + 1
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=size, stop_token_ids=sorted(ends) or [vocabulary]
    )
