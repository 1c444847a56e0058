"""Requests while they run: their tokens, their text, and what ends them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from formats.errors import EngineError, RequestError
from inference.scheduling.batch import Ints
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.constraint import Matcher
from inference.scheduling.detokenizer import Detokenizer, LateText
from inference.scheduling.request import (
    FinishReason,
    Item,
    ListView,
    RequestOutput,
    SamplingParams,
)
from inference.scheduling.sampler import (
    biases_of,
    likeliest,
    log_min_p,
    sample,
    top_logprobs,
)
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import MOST_BIASES, NEVER, Draw, Terms
from inference.scheduling.sequence import Sequence as TokenSequence
from inference.scheduling.step_result import Logprobs, StepResult
from inference.scheduling.work import Work

MakeMatcher = Callable[[Sequence[int]], Matcher]
NOT_FINITE = "the model's logits hold NaN or infinity; check the checkpoint"
Told = dict[int, dict[int, float]]  # log probabilities by place
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
        params: How it is decoded.
        logprobs: Of each generated token; None where they are not wanted.
        prompt_logprobs: Of the prompt's tokens, as far as they are known; None likewise.
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
        self.prompt, self.params, self._ends, self.told = list(prompt), params, ends, told
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, float] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._arrival = time.perf_counter()
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self._told = 0  # pieces of the text that outputs have told
        self._generator: torch.Generator | None = None
        seed = params.seed or 0
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                seed = self._generator.seed() >> 1  # a signed 64-bit integer holds it
            else:
                self._generator.manual_seed(params.seed)
        least = log_min_p(params.min_p)
        draw = Draw(params.temperature, params.top_p, params.top_k, least, seed)
        terms = self._terms(draw, limit)
        whole = self.wants_prompt_logits
        self.sequence = TokenSequence(name, list(prompt), terms, whole=whole, held=told is not None)
        self.sequence.takes_hits = params.prompt_logprobs is None
        self.sequence.next_mask = self.next_mask

    def _terms(self, draw: Draw, limit: int) -> Terms:
        """What the batch has to know of it."""
        params, prompt = self.params, len(self.prompt)
        plain = params.repetition_penalty == 1.0 and not (
            params.presence_penalty or params.frequency_penalty
        )
        biases = biases_of(params, self._ends)
        edited = bool(params.logit_bias) or params.constraint is not None
        told = params.logprobs is not None  # of logits as the model gave them: not edited in place
        fits = biases is None or len(biases.tokens) <= MOST_BIASES
        free = self.told is None and fits and not (edited and told)
        least = prompt + params.min_tokens if biases and told else 0
        if least or not (plain and free):
            biases = None
        return Terms(
            last=min(prompt + params.max_tokens, limit) - 1,
            ends=tuple(sorted(self._ends)),
            draw=draw,
            host_until=least if plain and free else NEVER,
            greedy=params.temperature == 0 and biases is None and not edited,
            watched=bool(params.stop or params.constraint) or params.prompt_logprobs is not None,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            biases=biases,
            masked=params.constraint is not None,
        )

    @property
    def tokens(self) -> list[int]:
        """What it has generated; a list that is only ever appended to."""
        self._tokens += self.sequence.known_from(len(self.prompt) + len(self._tokens))
        return self._tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not yet complete."""
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.prompt)

    def note_prompt(self, start: int, logits: Tensor) -> None:
        """Take the log probabilities of prompt tokens from the logits of those from `start` on."""
        found = self.prompt_logprobs
        assert found is not None
        tokens = self.prompt[len(found) : start + len(logits) + 1]
        known = len(found) - start - 1  # rows, from before a preemption
        rows = logits[known : known + len(tokens)]
        found += top_logprobs(rows, tokens, self.params.prompt_logprobs or 0)
        self.sequence.whole = self.wants_prompt_logits
        self.sequence.takes_hits = not self.sequence.whole

    def note_logprobs(self, own: dict[int, float]) -> None:
        """Take the log probabilities of its next token."""
        assert self.logprobs is not None
        self.logprobs.append(own)

    def fork(self, name: str, token: int) -> ActiveRequest:
        """A held request with the tokens of this one and one more."""
        other = copy.copy(self)
        other._tokens, other._times = [], []
        other.sequence = self.sequence.fork(name)
        other.sequence.append(token)
        return other

    def choose(self, logits: Tensor) -> int:
        """The next token, from logits [vocabulary]."""
        params, tokens = self.params, self.tokens
        early, mask = len(tokens) < params.min_tokens, None
        forbidden = sorted(self._ends) if early and self.matcher is None else ()
        if self.matcher is not None:
            mask = self.next_mask()
        return sample(logits, self.prompt, tokens, params, forbidden, self._generator, mask)

    def next_mask(self) -> np.ndarray:
        """Which tokens its constraint lets come next, as `Matcher.mask`."""
        assert self.matcher is not None
        early = self.params.ignore_eos or len(self.tokens) < self.params.min_tokens
        return self.matcher.mask(ends=not early)

    def ending(self) -> FinishReason | None:
        """The reason where its newest token, which is looked at once, is its last."""
        tokens, matcher = self.tokens, self.matcher
        if tokens[-1] in self._ends:
            return "stop"
        if matcher is not None and not matcher.accept(tokens[-1]):
            return "error"
        if self.params.stop:
            self._read()
            if self._detokenizer.stopped and len(tokens) >= self.params.min_tokens:
                return "stop"
        if matcher is not None and matcher.done:
            return "stop"
        return "length" if len(self.prompt) + len(tokens) > self.sequence.terms.last else None

    def close(
        self, reason: FinishReason, error: str | None = None, param: str | None = None
    ) -> RequestOutput:
        """End it; gives its final state, which no more steps change."""
        tokens = self.tokens
        text = LateText(self._detokenizer, self._with_text())
        if self.params.stop:
            len(text)  # what was held back may complete a stop text
            if self._detokenizer.stopped and reason == "length":
                reason = "stop"
        return RequestOutput(
            self.sequence.name,
            self.prompt,
            token_ids=tokens,
            pieces=text,
            told=self._told,
            finish_reason=reason,
            error=error,
            param=param,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            arrival=self._arrival,
            token_times=self._all_times(),
        )

    def snapshot(self) -> RequestOutput:
        """Its state as it is now, safe from later steps; costs the same at any length."""
        self._read()
        pieces, told = self._detokenizer.pieces, self._told
        self._told = len(pieces)
        return RequestOutput(
            self.sequence.name,
            self.prompt,
            token_ids=_as_now(self.tokens),
            pieces=_as_now(pieces),
            told=told,
            logprobs=None if self.logprobs is None else _as_now(self.logprobs),
            prompt_logprobs=(
                None if self.prompt_logprobs is None else _as_now(self.prompt_logprobs)
            ),
            arrival=self._arrival,
            token_times=_as_now(self._all_times()),
        )

    def _read(self) -> None:
        """Decode what has come since it was last looked at."""
        self._detokenizer.extend(self.tokens[self._detokenizer.taken :])

    def _with_text(self) -> list[int]:
        """Generated tokens but for one that ends it."""
        tokens = self.tokens
        return tokens[:-1] if tokens and tokens[-1] in self._ends else tokens

    def _all_times(self) -> list[float]:
        self._times += self.sequence.times_from(len(self._times))
        return self._times


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
                request.matcher = self._uncompiled[name].result()(request.params.stop_token_ids)
            except RequestError as error:
                refused.append(self.finish(request, "error", str(error), error.param))
            else:
                del self._uncompiled[name]
                self._scheduler.add(request.sequence)
        return refused

    def prepare_cache(self) -> None:
        """Copy and clear the blocks of the cache that the next step needs so; before it runs."""
        changes = self._scheduler.blocks.take_changes()
        if changes is None:
            return
        try:
            self._change_blocks(changes)
        except Exception as error:  # no second try: what was copied may be overwritten
            raise EngineError(f"blocks of the cache could not be copied: {error}") from error

    def fork(self, request: ActiveRequest, name: str, token: int) -> None:
        """Begin a held request with the tokens of another and one more; it shares their blocks."""
        other = self._by_name[name] = request.fork(name, token)
        self._scheduler.fork(request.sequence, other.sequence)

    def take_candidates(self) -> dict[str, Logprobs]:
        """What held requests may go on with: {token: log probability}; told once."""
        told, self.candidates = self.candidates, {}
        return told

    def take_tokens(self, places: Ints, tokens: Ints, told: Told) -> StepResult:
        """Give running requests their next tokens.

        Args:
            places: Whose.
            tokens: The token of each; negative where its logits were not finite.
            told: By place, the log probabilities of those that want them.
        """
        finite = tokens >= 0
        result = StepResult()
        if not finite.all():
            result.finished += [self._fail(place) for place in places[~finite].tolist()]
            places, tokens = places[finite], tokens[finite]
        batch = self._scheduler.batch
        for place in places[batch.logprobs[places] >= 0].tolist():
            own = result.logprobs[batch.names[place]] = told[place]
            self._at(place).note_logprobs(own)
        watched = batch.take(places, tokens, time.perf_counter())
        result.names = [batch.names[place] for place in places.tolist()]
        result.tokens = tokens.tolist()
        for name in compress(result.names, watched.tolist()):
            self._look_at(self[name], result)
        return result

    def take_logits(self, work: Work, which: Ints, logits: Tensor) -> StepResult:
        """Give requests the logits of their slices: for their prompts, and for their next tokens.

        Args:
            work: The step.
            which: Indices of slices of it, each with at least one row of logits.
            logits: fp32 [rows, vocabulary], on the host: the rows of each slice, in that order.
        """
        places, counts = work.places[which], work.rows[which]
        ends = np.cumsum(counts)
        each = torch.isfinite(logits).all(dim=1).numpy()
        finite = np.logical_and.reduceat(each, ends - counts)
        for i in np.flatnonzero(finite & work.whole[which]).tolist():
            rows = logits[ends[i] - counts[i] : ends[i]]
            self._at(int(places[i])).note_prompt(int(work.starts[which[i]]), rows)
        takes = finite & work.samples[which]
        for i in np.flatnonzero(takes & self._scheduler.batch.held_by_client[places]).tolist():
            request, takes[i] = self._at(int(places[i])), False
            assert request.told is not None
            name = request.sequence.name
            self.candidates[name] = likeliest(logits[ends[i] - 1], request.told)
        tokens = np.full(len(which), -1)
        last = logits[torch.from_numpy(ends[takes] - 1)] if takes.sum() < len(logits) else logits
        tokens[takes], told = self._choose(places[takes], last)
        heard = takes | ~finite
        return self.take_tokens(places[heard], tokens[heard], told)

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

    def ask_for_less(self, error: Exception) -> list[RequestOutput]:
        """After a step for which memory was too small, make those to come smaller.

        First of fewer tokens; where each has one at most, of fewer requests. Gives those that had
        to end: the newest half of what runs.
        """
        scheduler = self._scheduler
        if scheduler.max_batched_tokens > scheduler.max_batch_size:
            half = scheduler.max_batched_tokens // 2
            scheduler.max_batched_tokens = max(half, scheduler.max_batch_size)
            return []
        told = f"memory was too small for a step ({error}); older requests went on"
        newest = sorted(scheduler.running, key=lambda sequence: sequence.order)
        newest = newest[-max(1, len(newest) // 2) :]
        return [self.finish(self[sequence.name], "error", told) for sequence in newest]

    def drop(self) -> None:
        """Forget all of them, and whatever is cached, after a step that failed."""
        for name, request in self._by_name.items():
            if name not in self._uncompiled:
                self._scheduler.remove(request.sequence, failed=True)
        self._uncompiled.clear()
        self._scheduler.blocks.forget()
        self._by_name.clear()
        self.candidates.clear()

    def _choose(self, places: Ints, logits: Tensor) -> tuple[Ints, Told]:
        """The next tokens of requests from a row of logits each, and what is told of them."""
        batch = self._scheduler.batch
        tokens = logits.argmax(dim=1).numpy()
        for i in np.flatnonzero(~(batch.greedy[places] & batch.on_device(places))).tolist():
            tokens[i] = self._at(int(places[i])).choose(logits[i])
        told: Told = {}
        counts = batch.logprobs[places]
        for count in set(counts[counts >= 0].tolist()):
            rows = np.flatnonzero(counts == count)
            found = top_logprobs(logits[torch.from_numpy(rows)], tokens[rows].tolist(), count)
            told |= zip(places[rows].tolist(), found, strict=True)
        return tokens, told

    def _look_at(self, request: ActiveRequest, result: StepResult) -> None:
        """See whether a request that has a new token ends, and what else is to be told."""
        if request.prompt_logprobs is not None and len(request.tokens) == 1:
            result.prompt_logprobs[request.sequence.name] = request.prompt_logprobs
        if reason := request.ending():
            told = "no token goes on with what its constraint asks" if reason == "error" else None
            result.finished.append(self.finish(request, reason, told))

    def _fail(self, place: int) -> RequestOutput:
        return self.finish(self._at(place), "error", NOT_FINITE)

    def _at(self, place: int) -> ActiveRequest:
        return self._by_name[self._scheduler.batch.names[place]]
