"""Requests while they run: their tokens, their text, and what ends them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from formats.errors import RequestError
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.constraint import Matcher
from inference.scheduling.detokenizer import Detokenizer
from inference.scheduling.request import (
    FinishReason,
    Item,
    ListView,
    RequestOutput,
    SamplingParams,
)
from inference.scheduling.sampler import likeliest, sample, top_logprobs
from inference.scheduling.scheduler import PENDING, Scheduler, Slice
from inference.scheduling.scheduler import Sequence as TokenSequence
from inference.scheduling.step_result import Logprobs

MakeMatcher = Callable[[Sequence[int]], Matcher]
PATIENCE = 0.005  # seconds for which an idle engine waits for a constraint to be compiled


class ActiveRequest:
    """State of one request between its arrival and its end.

    Args:
        name: The request's.
        prompt: Its token ids.
        params: How it is decoded.
        tokenizer: A transformers tokenizer.
        ends: Tokens that end it.
        limit: Most tokens of prompt and output.
        told: If it is held: how many of the likeliest tokens are told whenever the next one is to
            come, which its client then chooses (`Engine.hold`).

    Attributes:
        sequence: Its tokens, for the scheduler.
        prompt: Its token ids.
        tokens: What it has generated.
        told: How many tokens are told; None where it is not held.
        matcher: Says which tokens may come, where it has a constraint.
    """

    matcher: Matcher | None = None

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        ends: frozenset[int],
        limit: int,
        told: int | None = None,
    ) -> None:
        self.sequence, self.prompt = TokenSequence(name, list(prompt)), list(prompt)
        self.sequence.takes_hits = params.prompt_logprobs is None
        self.tokens: list[int] = []
        self._times: list[float] = []
        self._arrival = time.perf_counter()
        self._logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[dict[int, float] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._params, self._ends, self._limit, self.told = params, ends, limit, told
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self._told = 0  # pieces of the text that outputs have told
        self._generator: torch.Generator | None = None
        self._seed = params.seed or 0
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._seed = self._generator.seed() >> 1  # a signed 64-bit integer holds it
            else:
                self._generator.manual_seed(params.seed)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end it beside the model's own."""
        return self._params.stop_token_ids

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not yet complete."""
        found = self._prompt_logprobs
        return found is not None and len(found) < len(self.prompt)

    def note_prompt(self, part: Slice, logits: Tensor) -> None:
        """Take the log probabilities of prompt tokens from the logits of a slice's tokens."""
        found = self._prompt_logprobs
        assert found is not None
        tokens = self.prompt[len(found) : part.start + len(logits) + 1]
        known = len(found) - part.start - 1  # rows, from before a preemption
        rows = logits[known : known + len(tokens)]
        found += top_logprobs(rows, tokens, self._params.prompt_logprobs or 0)
        self.sequence.takes_hits = not self.wants_prompt_logits

    @property
    def chosen_on_device(self) -> bool:
        """Whether temperature, top_k and top_p are all that its next token depends on."""
        params, made = self._params, len(self.tokens)
        plain = params.repetition_penalty == 1.0 and not (
            params.presence_penalty or params.frequency_penalty or params.logit_bias or params.min_p
        )
        if self.matcher is not None:
            return False
        silent = self._logprobs is None and not self.wants_prompt_logits and self.told is None
        return plain and silent and (made >= params.min_tokens or not self._ends)

    @property
    def draw(self) -> tuple[float, int, float, int, int]:
        """temperature, top_k, top_p, seed and number of the token that comes next."""
        params, made = self._params, len(self.sequence.tokens) - len(self.prompt)
        return params.temperature, params.top_k, params.top_p, self._seed, made

    def expect(self) -> None:
        """Keep a place for a token that is being chosen, unless it is the last."""
        made = len(self.sequence.tokens) - len(self.prompt)
        if made + 1 < self._params.max_tokens and len(self.sequence.tokens) + 1 < self._limit:
            self.sequence.tokens.append(PENDING)

    def extend(self, token: int) -> None:
        """Append the token that the client of a held request chose."""
        self.tokens.append(token)
        self.sequence.tokens.append(token)

    def fork(self, name: str, token: int) -> ActiveRequest:
        """A held request with the tokens of this one and one more."""
        other = copy.copy(self)
        other.tokens = self.tokens.copy()
        other.sequence = self.sequence.fork(name)
        other.extend(token)
        return other

    def take(self, logits: Tensor) -> FinishReason | None:
        """Choose the next token from logits [vocabulary]; the reason where it is the last."""
        params = self._params
        early = len(self.tokens) < params.min_tokens
        forbidden = sorted(self._ends) if early and self.matcher is None else ()
        token = sample(
            logits, self.prompt, self.tokens, params, forbidden, self._generator, self.mask
        )
        if self._logprobs is not None:
            self._logprobs += top_logprobs(logits[None], [token], params.logprobs or 0)
        return self.accept(token)

    @property
    def mask(self) -> np.ndarray | None:
        """Which tokens may come next, as `Matcher.mask`; None where all may."""
        if self.matcher is None:
            return None
        params = self._params
        early = params.ignore_eos or len(self.tokens) < params.min_tokens
        return self.matcher.mask(ends=not early)

    def accept(self, token: int) -> FinishReason | None:
        """Append the next token; the reason where it is the last."""
        params, made = self._params, len(self.tokens)
        self.tokens.append(token)
        self._times.append(time.perf_counter())
        place = len(self.prompt) + made
        self.sequence.tokens[place : place + 1] = [token]  # in the place that was kept, or new
        if token in self._ends:
            return "stop"
        if self.matcher is not None and not self.matcher.accept(token):
            return "error"
        self._detokenizer.add(token)
        if self._detokenizer.stopped and made + 1 >= params.min_tokens:
            return "stop"
        if self.matcher is not None and self.matcher.done:
            return "stop"
        full = place + 1 >= self._limit
        return "length" if made + 1 >= params.max_tokens or full else None

    def close(
        self, reason: FinishReason, error: str | None = None, param: str | None = None
    ) -> RequestOutput:
        """End it; gives its final state, which no more steps change."""
        self._detokenizer.finish()
        if self._detokenizer.stopped and reason == "length":
            reason = "stop"  # what was held back completed a stop text
        return replace(
            self.snapshot(),
            token_ids=self.tokens,
            pieces=self._detokenizer.pieces,
            finish_reason=reason,
            error=error,
            param=param,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            token_times=self._times,
        )

    def snapshot(self) -> RequestOutput:
        """Its state as it is now, safe from later steps; costs the same at any length."""
        pieces, told = self._detokenizer.pieces, self._told
        self._told = len(pieces)
        return RequestOutput(
            self.sequence.name,
            self.prompt,
            token_ids=_as_now(self.tokens),
            pieces=_as_now(pieces),
            delta="".join(pieces[told:]),
            logprobs=None if self._logprobs is None else _as_now(self._logprobs),
            prompt_logprobs=(
                None if self._prompt_logprobs is None else _as_now(self._prompt_logprobs)
            ),
            arrival=self._arrival,
            token_times=_as_now(self._times),
        )


def _as_now(items: list[Item]) -> ListView[Item]:
    return ListView(items, len(items))


class ActiveRequests(Mapping[str, ActiveRequest]):
    """The requests of an engine, by name, from their arrival to their end.

    Args:
        scheduler: Has their sequences.
        change_blocks: Copies and clears blocks of the cache.

    Attributes:
        candidates: Of held requests that wait for their next token, the likeliest, by name.
    """

    def __init__(self, scheduler: Scheduler, change_blocks: Callable[[BlockChanges], None]) -> None:
        self._scheduler, self._change_blocks = scheduler, change_blocks
        self._by_name: dict[str, ActiveRequest] = {}
        self.candidates: dict[str, Logprobs] = {}
        self._uncompiled: dict[str, Future[MakeMatcher]] = {}

    def __getitem__(self, name: str) -> ActiveRequest:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, request: ActiveRequest, compiled: Future[MakeMatcher] | None = None) -> None:
        """Queue a request; one that has a constraint when that is compiled."""
        self._by_name[request.sequence.name] = request
        if compiled is None:
            self._scheduler.add(request.sequence)
        else:
            self._uncompiled[request.sequence.name] = compiled

    def admit_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose constraints are compiled by now; gives those that are refused.

        Where there is nothing else to do it waits a little.
        """
        if not self._uncompiled:
            return []
        busy = self._scheduler.waiting or self._scheduler.running
        wait(self._uncompiled.values(), 0 if busy else PATIENCE, FIRST_COMPLETED)
        refused = []
        for name in [name for name, future in self._uncompiled.items() if future.done()]:
            request = self[name]
            try:
                request.matcher = self._uncompiled[name].result()(request.stop_token_ids)
            except RequestError as error:
                refused.append(self.finish(request, "error", str(error), error.param))
            else:
                del self._uncompiled[name]
                self._scheduler.add(request.sequence)
        return refused

    def prepare_cache(self) -> None:
        """Copy and clear the blocks of the cache that the next step needs so; before it runs."""
        changes = self._scheduler.blocks.take_changes()
        if changes is not None:
            self._change_blocks(changes)

    def fork(self, request: ActiveRequest, name: str, token: int) -> None:
        """Begin a held request with the tokens of another and one more; it shares their blocks."""
        other = self._by_name[name] = request.fork(name, token)
        self._scheduler.fork(request.sequence, other.sequence)

    def take_candidates(self) -> dict[str, Logprobs]:
        """What held requests may go on with: {token: log probability}; told once."""
        told, self.candidates = self.candidates, {}
        return told

    def take_logits(self, part: Slice, logits: Tensor) -> list[RequestOutput]:
        """Give a request the logits of its slice: for those of its prompt, and its next token."""
        request = self[part.sequence.name]
        if not bool(torch.isfinite(logits).all()):
            return [self._fail(request)]
        if request.wants_prompt_logits:
            request.note_prompt(part, logits)
        if not part.samples:
            return []
        if request.told is not None:
            self.candidates[part.sequence.name] = likeliest(logits[-1], request.told)
            return []
        return [self._after(request, request.take(logits[-1]))]

    def take_token(self, request: ActiveRequest, token: int) -> RequestOutput:
        """Give a request its next token; a negative one says that its logits were not finite."""
        if token < 0:
            return self._fail(request)
        return self._after(request, request.accept(token))

    def finish(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
    ) -> RequestOutput:
        """End a request and take its blocks back; `error` says why where the reason is that."""
        if self._uncompiled.pop(request.sequence.name, None) is None:
            self._scheduler.remove(request.sequence, failed=reason == "error")
        del self._by_name[request.sequence.name]
        self.candidates.pop(request.sequence.name, None)
        return request.close(reason, error, param)

    def drop(self) -> None:
        """Forget all of them, and whatever is cached, after a step that failed."""
        for name, request in self._by_name.items():
            if name not in self._uncompiled:
                self._scheduler.remove(request.sequence, failed=True)
        self._uncompiled.clear()
        self._scheduler.blocks.forget()
        self._by_name.clear()
        self.candidates.clear()

    def _after(self, request: ActiveRequest, reason: FinishReason | None) -> RequestOutput:
        if reason == "error":
            return self.finish(request, reason, "a token came that its constraint does not allow")
        return self.finish(request, reason) if reason else request.snapshot()

    def _fail(self, request: ActiveRequest) -> RequestOutput:
        told = "the model's logits hold NaN or infinity; check the checkpoint"
        return self.finish(request, "error", told)
