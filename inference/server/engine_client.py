"""The engine process as the HTTP process sees it: what goes there, what comes back, to whom.

Nothing here waits for the engine, and the engine waits for nothing here.
`inference.server.engine.process` carries the messages; tests put a fake engine in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from formats.errors import EngineError, RequestError
from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import FinishReason, SamplingParams, check_prompt, check_tokens
from inference.server import messages
from inference.server.messages import EngineInfo, EngineStats, FromEngine, ToEngine
from inference.server.open_requests import OpenRequests, QueueLimits
from inference.server.stream import DeltaStream

State = Literal["starting", "ready", "draining", "dead"]
STOPPING = "the server is stopping"


class Overloaded(EngineError):  # noqa: N818 (it passes)
    """More waits than may (429); nothing was queued.

    Args:
        retry_after: Seconds after which there should be room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(EngineError):  # noqa: N818
    """The engine takes no requests (503): it is loading, the server stops, or it is dead."""


class EngineClient:
    """Requests of an engine in another process; all of it is called on one event loop.

    Args:
        send: Sends a message there, without waiting.

    Attributes:
        state: `starting` until the engine is warm, `ready`, `draining` from `drain` on, `dead`.
        reason: Why it is dead; None before.
        requests: Those that have not ended.
        loaded: Whether it was warm once; also of one that died since.
        engines: Itself: `EngineFleet` has all of its engines here.
        routed: Nothing: there is no other engine to choose.
    """

    def __init__(self, send: Callable[[ToEngine], None], limits: QueueLimits | None = None) -> None:
        self._send, self.requests = send, OpenRequests(limits or QueueLimits())
        self.measures = self.requests.measures
        self.state: State = "starting"
        self.reason: str | None = None
        self.stats = EngineStats()
        self.loaded = False
        self.engines, self.routed = (self,), [{}]
        self._info: EngineInfo | None = None
        self._names = (f"r{i}" for i in count())
        self._answers: dict[str, asyncio.Future[Any]] = {}  # of beams and of adapters
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
    def adapters(self) -> Mapping[str, str]:
        """Folders of the adapters that requests may name.

        Raises:
            Unavailable: it is loading.
        """
        return self.info.adapters

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is warm.

        Raises:
            Unavailable: it died before.
        """
        while self.state == "starting":
            await self._changed.wait()
        return self.info

    async def dead(self) -> str:
        """Wait until the engine is dead; gives the reason."""
        while self.state != "dead":
            await self._changed.wait()
        return self.reason or ""

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, new_tokens: int | None = None
    ) -> DeltaStream:
        """Queue a request; its stream tells its tokens, and cancels it.

        What only the engine can refuse, such as a grammar, its stream raises when it is first read.

        Args:
            params: How it is decoded; the stream looks for its stop texts.
            new_tokens: Those of the prompt that the engine should have to compute; default: all.

        Raises:
            RequestError: the prompt is empty or too long, or the model does not know a token.
            Overloaded: more waits than may.
            Unavailable: the engine takes no requests.
        """
        if params.stop:
            params = params.model_copy(update={"stop": ()})
        name = self._admit(prompt, params.stop_token_ids)
        stream = DeltaStream(name, self._cancelled)
        self.requests.add(name, len(prompt), stream, new_tokens)
        self._send(messages.Submit(name, list(prompt), params))
        return stream

    async def beam(
        self, prompt: Sequence[int], params: BeamParams, new_tokens: int | None = None
    ) -> list[Hypothesis]:
        """Search for the likeliest continuations, the best first; cancelling the task ends it.

        Raises:
            RequestError, Overloaded, Unavailable: as `submit`.
            EngineError: the engine failed at it.
        """
        name = self._admit(prompt, params.stop_token_ids)
        self._answers[name] = done = asyncio.get_running_loop().create_future()
        self.requests.add(name, len(prompt), None, new_tokens)
        self._send(messages.Submit(name, list(prompt), params))
        try:
            return await done
        finally:
            if done.cancelled():
                self._cancelled(name, "abort")

    async def set_adapter(self, adapter: str, path: str | None) -> None:
        """Load an adapter from a folder, or with None unload it, while requests run.

        Raises:
            RequestError: the engine refuses; its message says why.
            Unavailable: the engine takes no requests.
        """
        self._check_taken()
        name = next(self._names)
        self._answers[name] = done = asyncio.get_running_loop().create_future()
        self._send(messages.SetAdapter(name, adapter, path))
        await done

    async def drain(self, seconds: float) -> None:
        """Take no more requests; wait until all have ended, and end them after so many seconds."""
        if self.state in ("starting", "ready"):
            self._change("draining")
        try:
            async with asyncio.timeout(seconds):
                while self.in_flight and self.state != "dead":
                    await self._changed.wait()
        except TimeoutError:
            names = self.requests.names
            self._fail(names, "abort", STOPPING)
            self._send(messages.Abort(names))

    def take(self, message: FromEngine) -> None:
        """Take what the engine says."""
        if isinstance(message, messages.Step):
            self.stats = message.stats
            self.requests.take_step(message)
            if not self.in_flight:
                self._change()
        elif isinstance(message, EngineInfo):
            self._info, self.loaded = message, True
            count = message.kv_blocks
            blocks = replace(self.stats.blocks, total=count, free=count)
            self.stats = replace(self.stats, blocks=blocks)
            if self.state == "starting":
                self._change("ready")
        elif isinstance(message, messages.Refused):
            error = RequestError(message.message, message.param)
            if (stream := self.requests.stream(message.name)) is not None:
                stream.refuse(error)
            self._end(message.name, "refused", error)
        elif isinstance(message, messages.Failed):
            self._fail(message.names, "error", message.message)
        elif isinstance(message, messages.BeamDone):
            self._end(message.name, "stop", message.hypotheses)
        elif isinstance(message, messages.AdapterSet):
            self._info = replace(self.info, adapters=message.adapters)
            self._end(message.name, "stop")
        else:
            self.lose(message)

    def lose(self, last: messages.Dead) -> None:
        """The engine is no more: every request ends, and no other is taken."""
        if self.state != "dead":
            self.reason = last.message
            blocks = replace(self.stats.blocks, total=0, free=0, used=0, cached=0)
            self.stats = replace(self.stats, waiting=0, running=0, blocks=blocks)
            self._change("dead")
            self._fail([*self.requests.names, *self._answers], "abort", last.message)

    def check(self, prompt: Sequence[int]) -> None:
        """Check that requests are taken, and that the model can take the prompt.

        Raises:
            RequestError: the prompt is empty or too long, or the model does not know a token.
            Unavailable: the engine takes no requests.
        """
        info = self._check_taken()
        check_prompt(prompt, info.max_model_len, info.max_positions, info.vocab_size)

    def _check_taken(self) -> EngineInfo:
        """Raise unless requests are taken."""
        if self.state == "draining":
            raise Unavailable(f"{STOPPING}; it takes no more requests")
        if self.state == "dead":
            raise Unavailable(f"the engine is dead: {self.reason}")
        return self.info

    def _admit(self, prompt: Sequence[int], ends: Sequence[int]) -> str:
        """A name for one more request; raise unless it may wait."""
        self.check(prompt)
        check_tokens(ends, self.info.vocab_size, "stop_token_ids")
        found = self.requests.full(len(prompt), self.info.max_batch_size)
        if found is not None:
            self.measures.overloaded += 1
            seconds = self.requests.seconds_to_wait()
            raise Overloaded(f"the queue is full: {found}. Try again in {seconds} s", seconds)
        return next(self._names)

    def _cancelled(self, name: str, reason: FinishReason) -> None:
        """A reader left, or has what it wants."""
        self._end(name, reason)
        if self.state != "dead":
            self._send(messages.Abort([name]))

    def _fail(self, names: Iterable[str], reason: Literal["error", "abort"], why: str) -> None:
        for name in names:
            if (stream := self.requests.stream(name)) is not None:
                stream.finish(reason, why)
            self._end(name, reason, EngineError(why) if reason == "error" else Unavailable(why))

    def _end(self, name: str, reason: str, answer: Any = None) -> None:
        """A request has ended, or an adapter is set: who waits gets an answer or an error."""
        done = self._answers.pop(name, None)
        if done is not None and not done.done():  # its reader has not left
            if isinstance(answer, Exception):
                done.set_exception(answer)
            else:
                done.set_result(answer)
        self.requests.end(name, reason)
        if not self.in_flight:
            self._change()

    def _change(self, state: State | None = None) -> None:
        """Enter a state, if one is given, and wake those that wait for a change."""
        self.state = state or self.state
        self._changed.set()
        self._changed = asyncio.Event()
