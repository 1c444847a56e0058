"""An engine without a model, in the place of the engine process: a real `EngineClient` before it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inference.beam_search import BeamParams, Hypothesis
from inference.requests.request import SamplingParams
from inference.scheduling.blocks import KVStats
from inference.server import messages
from inference.server.engine_client import EngineClient
from inference.server.open_requests import QueueLimits
from inference.server.stream import Delta, DeltaStream

INFO = messages.EngineInfo(
    max_model_len=512,
    max_positions=512,
    vocab_size=384,
    max_batch_size=4,
    end_tokens=frozenset({0}),
)
Answer = Callable[[Sequence[int], SamplingParams], Sequence[int]]


class Reading:
    """A stream's items, waited for one after another; the end of a block cancels it."""

    def __init__(self, stream: DeltaStream) -> None:
        self.stream = stream

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self.stream.cancel()

    def __aiter__(self) -> Reading:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.stream.read()) is None:
            if self.stream.over:
                raise StopAsyncIteration
            await self.stream.news.get()
        return delta


def counting(prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
    """Tokens without an end that depend on prompt, seed and adapter alone: all letters."""
    start = sum(prompt) + (params.seed or 0) + sum(map(ord, params.adapter or ""))
    return [65 + (start + i) % 26 for i in range(params.max_tokens)]


@dataclass
class _Running:
    params: SamplingParams
    prompt: Sequence[int]
    answer: Sequence[int]
    made: int = 0


@dataclass
class FakeEngine:
    """A step a `delay`, a token a request and step, `info.max_batch_size` requests at once.

    Attributes:
        answer: The tokens of a request; shorter than its `max_tokens`, they end with reason `stop`
            and must hold the end token.
        delay: Seconds of a step.
        refuse: (message, param) where every request, and every adapter, is refused.
        hold: Give no tokens while it is set.
        together: Tokens of each request in a step, as where drafts come.
        drafts: Drafts of each request in a step, of which all its tokens but the last come.
        found: Tokens of each prompt that the prefix cache holds.
        warm: Be ready at once; otherwise call `start`.
        sent: Every message that the client sent.
        client: What is tested.
    """

    answer: Answer = counting
    delay: float = 0.0
    refuse: tuple[str, str | None] | None = None
    hold: bool = False
    together: int = 1
    drafts: int = 0
    found: int = 0
    info: messages.EngineInfo = INFO
    limits: QueueLimits = field(default_factory=QueueLimits)
    warm: bool = True
    sent: list[messages.ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = EngineClient(self._receive, self.limits)
        self._requests: dict[str, _Running] = {}
        self._adapters = dict(self.info.adapters)
        self._task: asyncio.Task[None] | None = None
        if self.warm:
            self.start()

    @property
    def aborted(self) -> list[str]:
        """Names that the client aborted."""
        ends = [message for message in self.sent if isinstance(message, messages.Abort)]
        return [name for message in ends for name in message.names]

    @property
    def running(self) -> list[str]:
        """Names of requests that wait or run."""
        return list(self._requests)

    def start(self) -> None:
        """Be ready."""
        self.client.take(self.info)

    def fail(self, message: str = "a step failed") -> None:
        """Fail a step with all that waits or runs."""
        names = list(self._requests)
        self._requests.clear()
        self.client.take(messages.Failed(names, message))

    def die(self, message: str = "the engine process died with exit code -9") -> None:
        """Be gone."""
        self._requests.clear()
        self.client.lose(messages.Dead(message))

    def _receive(self, message: messages.ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, messages.Submit) and isinstance(message.params, BeamParams):
            params = SamplingParams(max_tokens=3, adapter=message.params.adapter)
            tokens = tuple(counting(message.prompt, params))
            found = [Hypothesis(tokens, -1.0, -3.0, "length", self._all(tokens, message.params))]
            done = messages.BeamDone(message.name, found * message.params.n)
            asyncio.get_running_loop().call_soon(self.client.take, done)
        elif isinstance(message, messages.Submit):
            if self.refuse is not None:
                refused = messages.Refused(message.name, *self.refuse)
                asyncio.get_running_loop().call_soon(self.client.take, refused)
                return
            answer = self.answer(message.prompt, message.params)
            self._requests[message.name] = _Running(message.params, message.prompt, answer)
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())
        elif isinstance(message, messages.Abort):
            for name in message.names:
                self._requests.pop(name, None)
        elif not self.hold:
            asyncio.get_running_loop().call_soon(self.client.take, self._set(message))

    def _set(self, message: messages.SetAdapter) -> messages.AdapterSet | messages.Refused:
        if self.refuse is not None:
            return messages.Refused(message.name, *self.refuse)
        if (message.adapter in self._adapters) == (message.path is not None):
            return messages.Refused(message.name, f"adapter: found {message.adapter!r}")
        self._adapters.pop(message.adapter, None)
        if message.path is not None:
            self._adapters[message.adapter] = message.path
        return messages.AdapterSet(message.name, dict(self._adapters))

    async def _run(self) -> None:
        while self._requests:
            await asyncio.sleep(self.delay or (0.001 if self.hold else 0))
            if not self.hold:
                self.client.take(self._step())

    def _step(self) -> messages.Step:
        names = list(self._requests)[: self.info.max_batch_size]
        step = messages.Step(stats=self._stats(len(names)))
        for name in [name for name in names for _ in range(self.together)]:
            if (request := self._requests.get(name)) is None:
                continue
            params, token = request.params, request.answer[request.made]
            step.found[name] = self.found
            step.names.append(name)
            step.tokens.append(token)
            if params.logprobs is not None:
                step.logprobs.append((name, self._logprobs(token, params.logprobs)))
            if params.prompt_logprobs is not None and request.made == 0:
                number = params.prompt_logprobs
                found = [self._logprobs(t, number) for t in request.prompt[1:]]
                step.prompt_logprobs[name] = [None, *found]
            request.made += 1
            if request.made in (params.max_tokens, len(request.answer)):
                cut = request.made == params.max_tokens
                step.ended.append((name, "length" if cut else "stop", None))
                del self._requests[name]
        if self.drafts:
            gained = Counter(step.names)
            step.drafts += [(name, self.drafts, gained[name] - 1) for name in names]
        return step

    def _all(
        self, tokens: Sequence[int], params: BeamParams
    ) -> tuple[dict[int, float], ...] | None:
        if params.logprobs is None:
            return None
        return tuple(self._logprobs(token, params.logprobs) for token in tokens)

    def _logprobs(self, token: int, number: int) -> dict[int, float]:
        """The token's, -0.5, and less likely ones of the tokens after it."""
        vocabulary = self.info.vocab_size
        return {(token + i) % vocabulary: -0.5 - i for i in range(max(1, number))}

    def _stats(self, running: int) -> messages.EngineStats:
        blocks = self.info.kv_blocks
        waiting = len(self._requests) - running
        return messages.EngineStats(waiting, running, KVStats(blocks, blocks - running, running))
