"""The requests that have not ended, as the HTTP process counts, times and feeds them.

`inference.server.metrics` shows what was counted and timed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.server.messages import Step
from inference.server.stream import DeltaStream

# Bounds as in vLLM, so that its dashboards show ours.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
FIRST_TOKEN += (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
INTER_TOKEN += (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
WHOLE += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """How many values lie up to each bound.

    Args:
        bounds: Ascending.

    Attributes:
        counts: Of values up to each bound and above the one before; the last has no bound.
        total: Sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class Measures:
    """Sums since the start; times are seconds, as the HTTP process sees them.

    Attributes:
        prompt_tokens: Of prompts whose requests have their first token.
        generation_tokens: Tokens that arrived.
        finished: Requests that ended, by reason: `stop`, `length`, `error`, `abort` (their client
            left, or the server stopped) and `refused` (by the engine).
        overloaded: Requests that found the queue full.
        first_token: From a request's arrival to its first token.
        inter_token: Between two tokens of a request.
        whole: From a request's arrival to its end.
        prompt_lengths: Tokens of prompts.
        generation_lengths: Tokens of answers.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    overloaded: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    generation_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait.

    Attributes:
        requests: Requests beyond those that can run at once.
        tokens: Tokens of prompts of requests that have no token yet; one alone may have more.
    """

    requests: int = 1024
    tokens: int = 2**20


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        stream: Its tokens go there; None for a beam search, which gives none before its end.
        prompt: Tokens of its prompt.
        new_tokens: Those of them that are to be computed.
        arrival: When it arrived.
        last: When its last token arrived; 0 before the first.
        made: Tokens that arrived.
    """

    stream: DeltaStream | None
    prompt: int
    new_tokens: int
    arrival: float
    last: float = 0.0
    made: int = 0


class OpenRequests:
    """The requests of a client that have not ended, by name.

    Attributes:
        new_tokens: Tokens of prompts that are still to be computed, of requests without a token.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.measures = Measures()
        self._limits = limits
        self._requests: dict[str, OpenRequest] = {}
        # of requests that have no token yet
        self._queued = self._queued_tokens = self.new_tokens = 0
        self._last_tokens = -1.0  # when tokens arrived last
        self._ends: deque[float] = deque(maxlen=64)  # when the last requests ended

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [*self._requests]

    def stream(self, name: str) -> DeltaStream | None:
        """The stream of one; None where it has none, or has ended."""
        request = self._requests.get(name)
        return None if request is None else request.stream

    def add(
        self, name: str, prompt: int, stream: DeltaStream | None, new_tokens: int | None = None
    ) -> None:
        """Take a request of so many tokens in, of which so many are to be computed, or all."""
        new_tokens = prompt if new_tokens is None else new_tokens
        request = OpenRequest(stream, prompt, new_tokens, time.perf_counter())
        self._requests[name] = request
        self._count_queued(request, 1)

    def full(self, prompt: int, places: int) -> str | None:
        """Why a prompt of so many tokens may not wait, if so, where so many requests can run."""
        waiting, limits = len(self._requests) - places, self._limits
        tokens = self._queued_tokens
        if waiting >= limits.requests:
            return f"{waiting} requests wait; {limits.requests} may"
        if tokens and tokens + prompt > limits.tokens:
            return f"prompts of {tokens} tokens wait; with {limits.tokens} it is full"
        return None

    def seconds_to_wait(self) -> int:
        """When half of what waits should be gone: who comes then finds it neither full nor idle."""
        span = time.perf_counter() - self._ends[0] if self._ends else 0.0
        rate = len(self._ends) / span if span else 1.0
        return min(60, max(1, round(self._queued / 2 / rate)))

    def take_step(self, step: Step) -> None:
        """Give what a step gained to the streams."""
        for name, prompt_logprobs in step.prompt_logprobs.items():
            if (stream := self.stream(name)) is not None:
                stream.gained.prompt_logprobs = prompt_logprobs
        for name, logprobs in step.logprobs:
            if (stream := self.stream(name)) is not None:
                gained = stream.gained
                gained.logprobs = [] if gained.logprobs is None else gained.logprobs
                gained.logprobs.append(logprobs)
        for name, count in step.found.items():
            if (stream := self.stream(name)) is not None and not self._requests[name].made:
                stream.gained.cached = count  # one with tokens was preempted, and finds its own
        if step.names:
            self._take_tokens(step)
        for name, drafts, accepted in step.drafts:
            if (stream := self.stream(name)) is not None:
                stream.gained.drafts += drafts
                stream.gained.accepted += accepted
        for name, reason, error in step.ended:
            if (stream := self.stream(name)) is not None:
                stream.finish(reason, error)
                self.end(name, reason)

    def end(self, name: str, reason: str) -> None:
        """A request has ended, if it had not before."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        now, measures = time.perf_counter(), self.measures
        if not request.last:
            self._count_queued(request, -1)
        self._ends.append(now)
        measures.finished[reason] += 1
        measures.whole.add(now - request.arrival)
        measures.generation_lengths.add(request.made)

    def _take_tokens(self, step: Step) -> None:
        requests, measures = self._requests, self.measures
        now, before, steady, taken = time.perf_counter(), self._last_tokens, 0, 0
        gained = Counter(step.names)
        for name, token in zip(step.names, step.tokens, strict=True):
            request = requests.get(name)
            if request is None or request.stream is None:  # cancelled, or a beam
                continue
            request.stream.gained.token_ids.append(token)
            request.stream.tell()
            request.made += 1
            taken += 1
            count = gained[name]
            if request.last == now:  # counted with the first of them
                continue
            if request.last == before and count == 1:  # as nearly all
                steady += 1
            elif request.last:  # tokens that arrived together share the time
                measures.inter_token.add((now - request.last) / count, count)
            else:
                measures.inter_token.add(0.0, count - 1)
                self._take_first(request, now)
            request.last = now
        if steady:
            measures.inter_token.add(now - before, steady)
        measures.generation_tokens += taken
        self._last_tokens = now

    def _take_first(self, request: OpenRequest, now: float) -> None:
        self._count_queued(request, -1)
        self.measures.first_token.add(now - request.arrival)
        self.measures.prompt_tokens += request.prompt
        self.measures.prompt_lengths.add(request.prompt)

    def _count_queued(self, request: OpenRequest, one: int) -> None:
        self._queued += one
        self._queued_tokens += one * request.prompt
        self.new_tokens += one * request.new_tokens
