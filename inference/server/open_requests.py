"""The requests that have not ended, as the HTTP process counts, times and feeds them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from inference.server.measures import Measures
from inference.server.messages import Step
from inference.server.stream import DeltaStream


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
        arrival: When it arrived.
        last: When its last token arrived; 0 before the first.
        made: Tokens that arrived.
    """

    stream: DeltaStream | None
    prompt: int
    arrival: float
    last: float = 0.0
    made: int = 0


class OpenRequests:
    """The requests of a client that have not ended, by name.

    Args:
        limits: How much may wait.

    Attributes:
        measures: What was counted and timed of all requests.
        new_tokens: Tokens of prompts that are still to be computed, of requests without a token.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.measures = Measures()
        self._limits = limits
        self._requests: dict[str, OpenRequest] = {}
        # (tokens of the prompt, those to be computed) of requests that have no token yet
        self._queued: dict[str, tuple[int, int]] = {}
        self._queued_tokens = self.new_tokens = 0
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
        self._requests[name] = OpenRequest(stream, prompt, time.perf_counter())
        new_tokens = prompt if new_tokens is None else new_tokens
        self._queued[name] = prompt, new_tokens
        self._queued_tokens += prompt
        self.new_tokens += new_tokens

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
        return min(60, max(1, round(len(self._queued) / 2 / rate)))

    def take_step(self, step: Step) -> None:
        """Give what a step gained to the streams."""
        requests: Mapping[str, OpenRequest] = self._requests
        for name, prompt_logprobs in step.prompt_logprobs:
            if (stream := self.stream(name)) is not None:
                stream.add_prompt_logprobs(prompt_logprobs)
        for name, logprobs in step.logprobs:
            if (stream := self.stream(name)) is not None:
                stream.add_logprobs(logprobs)
        if step.names:
            self._take_tokens(requests, step)
        for name, drafts, accepted in step.drafts:
            if (stream := self.stream(name)) is not None:
                stream.add_drafts(drafts, accepted)
        for name, reason, error in step.finished:
            if (stream := self.stream(name)) is not None:
                stream.finish(reason, error)
                self.end(name, reason)

    def end(self, name: str, reason: str) -> None:
        """A request has ended, if it had not before."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        now, measures = time.perf_counter(), self.measures
        self._leave_queue(name)
        self._ends.append(now)
        measures.finished[reason] += 1
        measures.whole.add(now - request.arrival)
        measures.generation_lengths.add(request.made)

    def _take_tokens(self, requests: Mapping[str, OpenRequest], step: Step) -> None:
        measures = self.measures
        now, before, steady, taken = time.perf_counter(), self._last_tokens, 0, 0
        gained = Counter(step.names)
        for name, token in zip(step.names, step.tokens, strict=True):
            request = requests.get(name)
            if request is None or request.stream is None:  # cancelled, or a beam
                continue
            request.stream.add_token(token)
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
                self._take_first(name, request, now)
            request.last = now
        if steady:
            measures.inter_token.add(now - before, steady)
        measures.generation_tokens += taken
        self._last_tokens = now

    def _take_first(self, name: str, request: OpenRequest, now: float) -> None:
        self._leave_queue(name)
        measures = self.measures
        measures.first_token.add(now - request.arrival)
        measures.prompt_tokens += request.prompt
        measures.prompt_lengths.add(request.prompt)

    def _leave_queue(self, name: str) -> None:
        prompt, new_tokens = self._queued.pop(name, (0, 0))
        self._queued_tokens -= prompt
        self.new_tokens -= new_tokens
