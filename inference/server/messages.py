"""What the two processes of a server tell each other, and the engine process's end of their socket.

The HTTP process sends `Submit`, `Abort` and `SetAdapter`; the engine process answers with
`EngineInfo` once it is warm, with a `Step` after each step of the engine, and with the others where
there is cause. A name is one request's, or one `SetAdapter`'s, for as long as the server lives: the
HTTP process makes it, and never twice. A message is four bytes, its length, and its pickle: both
ends are ours, and nobody else has them.

Draining is no message: the HTTP process refuses what comes, and closes the socket when what runs
has ended. That ends the engine process.
"""

from __future__ import annotations

import pickle
import selectors
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import FinishReason, SamplingParams, StepResult
from inference.scheduling.blocks import KVStats
from inference.speculate.counts import DraftCounts


@dataclass(frozen=True)
class Submit:
    """Queue a request.

    Attributes:
        params: How it is decoded, without stop texts, which the HTTP process looks for; or how
            beams are searched.
    """

    name: str
    prompt: Sequence[int]
    params: SamplingParams | BeamParams


@dataclass(frozen=True)
class Abort:
    """End requests before the next step; those that have ended are passed over."""

    names: list[str]


@dataclass(frozen=True)
class SetAdapter:
    """Load an adapter before the next step, or unload it.

    Attributes:
        name: The message's, for its answer.
        path: The adapter's folder; None: it is unloaded.
    """

    name: str
    adapter: str
    path: str | None


@dataclass(frozen=True)
class EngineInfo:
    """What engine answers, which is loaded and warm.

    Attributes:
        max_model_len: Most tokens of a request, prompt and output.
        max_positions: Most that the model would allow it.
        vocab_size: Token ids are below it.
        max_batch_size: Most requests that run at once.
        device: Where it runs, such as `cpu` or `cuda:0`.
        quantization: Name of the checkpoint's scheme, such as `a8w8c8`; `float` without one.
        kv_cache: Type of K and V in the cache, such as `int8`, `int8/int4` or `float32`.
        speculates: Whether its steps have drafts of the next tokens.
    """

    max_model_len: int
    max_positions: int
    vocab_size: int
    max_batch_size: int
    kv_blocks: int = 0
    block_size: int = 64
    device: str = "cpu"
    quantization: str = "float"
    kv_cache: str = "float32"
    end_tokens: frozenset[int] = frozenset()
    speculates: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """The engine after a step. Counts are of now, or, where it says so, since it started.

    Attributes:
        waiting: Requests that wait for a place or for blocks.
        running: Requests that run.
        blocks: Those of the cache, and what was found in them since the start.
        drafts: Since the start.
        corrupted: Requests that ended because their logits held NaN or infinity, since the start.
        failed_steps: Steps that failed, since the start.
    """

    waiting: int = 0
    running: int = 0
    blocks: KVStats = field(default_factory=lambda: KVStats(0, 0, 0))
    drafts: DraftCounts = field(default_factory=DraftCounts)
    corrupted: int = 0
    failed_steps: int = 0


@dataclass
class Step(StepResult):
    """What a step of the engine gave, or what several gave that the HTTP process was too slow for.

    Attributes:
        ended: (name, reason, why where the reason is `error`) of requests that ended, in the place
            of what is `finished`. What they gained is in this message or in one before it.
        stats: The engine after the last of the steps.
    """

    ended: list[tuple[str, FinishReason, str | None]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)

    def merge(self, later: Step) -> None:
        """Add what a later step gave."""
        super().__iadd__(later)
        self.ended += later.ended
        self.stats = later.stats


@dataclass(frozen=True)
class Refused:
    """The engine does not take a request, or an adapter.

    Attributes:
        name: The request's, or that of `SetAdapter`.
    """

    name: str
    message: str
    param: str | None = None


@dataclass(frozen=True)
class Failed:
    """Requests that a failed step took along; the engine goes on."""

    names: list[str]
    message: str


@dataclass(frozen=True)
class BeamDone:
    """A beam search has ended; the best hypothesis is the first."""

    name: str
    hypotheses: list[Hypothesis]


@dataclass(frozen=True)
class AdapterSet:
    """An adapter has been loaded or unloaded.

    Attributes:
        name: That of `SetAdapter`.
    """

    name: str
    adapters: Mapping[str, str]


@dataclass(frozen=True)
class Dead:
    """The engine cannot go on, or could not be loaded; the process ends."""

    message: str


ToEngine = Submit | Abort | SetAdapter
FromEngine = EngineInfo | Step | Refused | Failed | BeamDone | AdapterSet | Dead


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
    """The engine process's end: messages from and to the HTTP process, for which it never waits.

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
