"""The engine process as the HTTP process sees it: what goes there, what comes back, to whom.

Nothing here waits for the engine, and the engine waits for nothing here. `inference.server.link`
carries the messages; tests put a fake engine in its place.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from formats.errors import EngineError, RequestError
from inference.beam_search import BeamParams, Hypothesis
from inference.scheduling.request import SamplingParams, check_prompt, check_tokens
from inference.server.messages import (
    Abort,
    BeamDone,
    Dead,
    EngineInfo,
    EngineStats,
    Failed,
    FromEngine,
    Ready,
    Refused,
    Step,
    Submit,
    SubmitBeam,
    ToEngine,
)
from inference.server.token_stream import TokenStream

State = Literal["starting", "ready", "draining", "dead"]


class Overloaded(EngineError):  # noqa: N818 (it passes)
    """More waits than may (429); nothing was queued.

    Args:
        message: What waits, and what may.
        retry_after: Seconds after which there should be room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(EngineError):  # noqa: N818
    """The engine takes no requests (503): it is loading, the server stops, or it is dead."""


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait.

    Attributes:
        requests: Requests beyond those that can run at once.
        tokens: Tokens of prompts of requests that have no token yet; one alone may have more.
    """

    requests: int = 1024
    tokens: int = 2**20


class EngineClient:
    """Requests of an engine in another process; all of it is called on one event loop.

    Args:
        send: Sends a message there, without waiting.
        limits: How much may wait.

    Attributes:
        state: `starting` until the engine is warm, `ready`, `draining` from `drain` on, `dead`.
        reason: Why it is dead; None before.
        stats: The engine after its last step.
    """

    def __init__(self, send: Callable[[ToEngine], None], limits: QueueLimits | None = None) -> None:
        self._send, self._limits = send, limits or QueueLimits()
        self.state: State = "starting"
        self.reason: str | None = None
        self.stats = EngineStats()
        self._info: EngineInfo | None = None
        self._names = (f"r{i}" for i in count())
        self._streams: dict[str, TokenStream] = {}
        self._beams: dict[str, asyncio.Future[list[Hypothesis]]] = {}
        self._queued: dict[str, int] = {}  # tokens of prompts of requests that have no token yet
        self._ends: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._changed = asyncio.Event()  # the state, or that all requests have ended

    @property
    def info(self) -> EngineInfo:
        """What engine it is.

        Raises:
            Unavailable: it is loading.
        """
        if self._info is None:
            raise Unavailable(self.reason or "the model is being loaded; try again soon")
        return self._info

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return len(self._streams) + len(self._beams)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is warm.

        Raises:
            Unavailable: it died before.
        """
        while self.state == "starting":
            await self._change()
        return self.info

    async def dead(self) -> str:
        """Wait until the engine is dead; gives the reason."""
        while self.state != "dead":
            await self._change()
        return self.reason or ""

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> TokenStream:
        """Queue a request; its stream tells its tokens, and cancels it.

        What only the engine can refuse, such as a grammar, its stream raises when it is first read.

        Args:
            prompt: Token ids.
            params: How it is decoded, without stop texts: `inference.server.text_stream`.

        Raises:
            RequestError: the prompt is empty or too long, or the model does not know a token.
            Overloaded: more waits than may.
            Unavailable: the engine takes no requests.
        """
        if params.stop:
            params = params.model_copy(update={"stop": ()})
        self._admit(prompt)
        check_tokens(params.stop_token_ids, self.info.vocab_size, "stop_token_ids")
        name = next(self._names)
        stream = self._streams[name] = TokenStream(name, self._cancelled)
        self._queued[name] = len(prompt)
        self._send(Submit(name, list(prompt), params))
        return stream

    async def beam(self, prompt: Sequence[int], params: BeamParams) -> list[Hypothesis]:
        """Search for the likeliest continuations, the best first; cancelling the task ends it.

        Raises:
            RequestError, Overloaded, Unavailable: as `submit`.
            EngineError: the engine failed at it.
        """
        self._admit(prompt)
        name = next(self._names)
        done: asyncio.Future[list[Hypothesis]] = asyncio.get_running_loop().create_future()
        self._beams[name] = done
        self._send(SubmitBeam(name, list(prompt), params))
        try:
            return await done
        finally:
            if self._beams.pop(name, None) is not None:
                self._ended()
            if done.cancelled():
                self._send(Abort([name]))

    async def drain(self, seconds: float) -> None:
        """Take no more requests; wait until all have ended, and end them after so many seconds."""
        if self.state in ("starting", "ready"):
            self._become("draining")
        try:
            async with asyncio.timeout(seconds):
                while self.in_flight and self.state != "dead":
                    await self._change()
        except TimeoutError:
            names = [*self._streams, *self._beams]
            self._end_all("the server is stopping")
            self._send(Abort(names))

    def take(self, message: FromEngine) -> None:
        """Take what the engine says."""
        if isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Ready):
            self._info = message.info
            self.stats = replace(self.stats, blocks_total=message.info.kv_blocks)
            if self.state == "starting":
                self._become("ready")
        elif isinstance(message, Refused):
            if message.name in self._streams:
                self._streams[message.name].refuse(message.message, message.param)
            self._answer_beam(message.name, RequestError(message.message, message.param))
            self._forget([message.name])
        elif isinstance(message, Failed):
            self._fail(message.names, "error", message.message)
        elif isinstance(message, BeamDone):
            self._answer_beam(message.name, message.hypotheses)
            self._forget([message.name])
        else:
            self.lose(message)

    def lose(self, last: Dead) -> None:
        """The engine is no more: every request ends, and no other is taken."""
        if self.state == "dead":
            return
        self.reason = last.message
        self._become("dead")
        self._end_all(last.message)

    def _take_step(self, step: Step) -> None:
        streams, queued = self._streams, self._queued
        self.stats = step.stats
        for name, prompt_logprobs in step.prompt_logprobs:
            if name in streams:
                streams[name].add_prompt_logprobs(prompt_logprobs)
        for name, logprobs in step.logprobs:
            if name in streams:
                streams[name].add_logprobs(logprobs)
        for name, token in zip(step.names, step.tokens, strict=True):
            if name in streams:
                streams[name].add_token(token)
                if name in queued:
                    del queued[name]
        for name, reason, error in step.finished:
            if name in streams:
                streams[name].finish(reason, error)
        if step.finished:
            self._forget(name for name, _, _ in step.finished)

    def _admit(self, prompt: Sequence[int]) -> None:
        """Raise unless one more request may wait."""
        if self.state == "draining":
            raise Unavailable("the server is stopping; it takes no more requests")
        if self.state == "dead":
            raise Unavailable(f"the engine is dead: {self.reason}")
        info = self.info
        check_prompt(prompt, info.max_model_len, info.max_positions, info.vocab_size)
        waiting, most = self.in_flight - info.max_batch_size, self._limits.requests
        if waiting >= most:
            raise self._overloaded(f"{waiting} requests wait; {most} may")
        tokens, most = sum(self._queued.values()), self._limits.tokens
        if tokens and tokens + len(prompt) > most:
            raise self._overloaded(f"prompts of {tokens} tokens wait; with {most} it is full")

    def _overloaded(self, found: str) -> Overloaded:
        """Says to come back when half of what waits should be gone: neither full nor idle then."""
        span = time.monotonic() - self._ends[0] if self._ends else 0.0
        rate = len(self._ends) / span if span else 1.0
        seconds = min(60, max(1, round(len(self._queued) / 2 / rate)))
        return Overloaded(f"the queue is full: {found}. Try again in {seconds} s", seconds)

    def _cancelled(self, name: str) -> None:
        """A stream's reader left."""
        self._forget([name])
        if self.state != "dead":
            self._send(Abort([name]))

    def _fail(self, names: Iterable[str], reason: Literal["error", "abort"], why: str) -> None:
        names = list(names)
        for name in names:
            if name in self._streams:
                self._streams[name].finish(reason, why)
            self._answer_beam(name, EngineError(why) if reason == "error" else Unavailable(why))
        self._forget(names)

    def _answer_beam(self, name: str, answer: list[Hypothesis] | Exception) -> None:
        done = self._beams.get(name)
        if done is None or done.done():  # its reader left
            return
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)

    def _end_all(self, why: str) -> None:
        self._fail([*self._streams, *self._beams], "abort", why)

    def _forget(self, names: Iterable[str]) -> None:
        now = time.monotonic()
        for name in names:
            self._queued.pop(name, None)
            if self._streams.pop(name, None) or self._beams.pop(name, None):
                self._ends.append(now)
        self._ended()

    def _ended(self) -> None:
        if not self.in_flight:
            self._tell()

    def _become(self, state: State) -> None:
        self.state = state
        self._tell()

    def _tell(self) -> None:
        """Wake those that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
