"""The requests of an engine, from their arrival to their end: their tokens, their text, what ends
them, and whose blocks come back."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from formats.errors import EngineEndedError, EngineError, RequestError
from inference.requests.detokenizer import Detokenizer, LateText
from inference.requests.request import (
    FinishReason,
    Item,
    ListView,
    Logprobs,
    RequestOutput,
    SamplingParams,
)
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.sampler import biases_of, log_min_p, sample, top_logprobs
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import MOST_EDITS, NEVER, Draw, Terms
from inference.scheduling.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from inference.structured.compiler import GrammarMatcher, MakeMatcher

PATIENCE = 0.005  # seconds for which an idle engine waits for a constraint to be compiled


class ActiveRequest:
    """State of one request between its arrival and its end.

    Args:
        tokenizer: A transformers tokenizer.
        ends: Tokens that end it.
        limit: Most tokens of prompt and output.
        candidates: If it is held: how many of the likeliest tokens are returned whenever the next
            one is to come, which its client then chooses (`Engine.hold`).
        adapter: Slot of its adapter; -1 for none.
        given: Tokens before the prompt whose K and V that gives.

    Attributes:
        sequence: Its tokens, for the scheduler.
        prompt: Its token ids.
        params: How it is decoded.
        logprobs: Of each generated token; None where they are not wanted.
        prompt_logprobs: Of the prompt's tokens, as far as they are known; None likewise.
        candidates: How many tokens are returned; None where it is not held.
        matcher: Says which tokens may come, where it has a constraint.
    """

    matcher: GrammarMatcher | None = None

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        ends: frozenset[int],
        limit: int,
        candidates: int | None = None,
        adapter: int = -1,
        given: int = 0,
    ) -> None:
        self._given, self.prompt, self.params = given, list(prompt), params
        self._ends, self.candidates = ends, candidates
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in range(self._first_scored)]
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._arrival = time.perf_counter()
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self._returned = 0  # pieces of the text that outputs have returned
        seed = secrets.randbits(63) if params.seed is None else params.seed
        least = log_min_p(params.min_p)
        draw = Draw(params.temperature, params.top_p, params.top_k, least, seed)
        self._seed, terms = seed, replace(self._terms(draw, limit), adapter=adapter)
        whole = self.wants_prompt_logits
        tokens = [0] * given + list(prompt)
        self.sequence = TokenSequence(
            name, tokens, terms, whole=whole, held=candidates is not None, given=given
        )
        self.sequence.findable = self._findable
        self.sequence.next_masks = self.next_masks

    def _terms(self, draw: Draw, limit: int) -> Terms:
        """What the batch has to know of it."""
        params, prompt = self.params, self._given + len(self.prompt)
        plain = params.repetition_penalty == 1.0 and not (
            params.presence_penalty or params.frequency_penalty
        )
        biases = biases_of(params, self._ends)
        edited = bool(params.logit_bias) or params.constraint is not None
        logprobs = params.logprobs is not None  # of logits as the model gave them: unedited
        fits = biases is None or len(biases.tokens) <= MOST_EDITS
        free = self.candidates is None and fits and not (edited and logprobs)
        least = prompt + params.min_tokens if biases and logprobs else 0
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
        self._tokens += self.sequence.known_from(self.sequence.prompt + len(self._tokens))
        return self._tokens

    @property
    def _first_scored(self) -> int:
        """The first token of the prompt whose log probability is returned, if any is."""
        return min(max(1, self.params.prompt_logprobs_start), len(self.prompt))

    @property
    def _findable(self) -> int | None:
        """Of how many first tokens the logits are not wanted, but for those of the last."""
        if not self.wants_prompt_logits:
            return None
        return self._given + self._first_scored if self.params.prompt_logprobs_start else 0

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not yet complete."""
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.prompt)

    def note_prompt(self, start: int, logits: Tensor) -> None:
        """Take the log probabilities of prompt tokens from the logits of those from `start` on."""
        found, start = self.prompt_logprobs, start - self._given
        assert found is not None
        tokens = self.prompt[len(found) : start + len(logits) + 1]
        known = len(found) - start - 1  # rows, from before a preemption
        rows = logits[known : known + len(tokens)]
        found += top_logprobs(rows, tokens, self.params.prompt_logprobs or 0)
        self.sequence.whole = self.wants_prompt_logits
        self.sequence.findable = self._findable

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
            (mask,) = self.next_masks(())
        return sample(logits, self.prompt, tokens, params, forbidden, self._seed, mask)

    def next_masks(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """Which tokens its constraint lets come next, and after each of some drafts.

        Returns:
            One more than there are drafts, each as `GrammarMatcher.mask`.
        """
        assert self.matcher is not None
        least, made = self.params.min_tokens, len(self.tokens)
        ends = [not (self.params.ignore_eos or made + i < least) for i in range(len(drafts) + 1)]
        if not drafts:
            return [self.matcher.mask(ends=ends[0])]
        return self.matcher.masks_behind(drafts, ends)

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
        return "length" if self.sequence.prompt + len(tokens) > self.sequence.terms.last else None

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
            returned=self._returned,
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
        pieces, returned = self._detokenizer.pieces, self._returned
        self._returned = len(pieces)
        return RequestOutput(
            self.sequence.name,
            self.prompt,
            token_ids=_as_now(self.tokens),
            pieces=_as_now(pieces),
            returned=returned,
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


class ActiveRequests(Mapping[str, ActiveRequest]):
    """The requests of an engine, by name, from their arrival to their end.

    Args:
        change_blocks: Copies and clears blocks of the cache.

    Attributes:
        scheduler: Has their sequences.
        candidates: Of held requests that wait for their next token, the likeliest, by name.
    """

    def __init__(self, scheduler: Scheduler, change_blocks: Callable[[BlockChanges], None]) -> None:
        self.scheduler, self._change_blocks = scheduler, change_blocks
        self._by_name: dict[str, ActiveRequest] = {}
        self.candidates: dict[str, Logprobs] = {}
        self._uncompiled: dict[str, Future[MakeMatcher]] = {}

    def __getitem__(self, name: str) -> ActiveRequest:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def at(self, place: int) -> ActiveRequest:
        """The request in a slot of the running batch."""
        return self._by_name[self.scheduler.batch.names[place]]

    def add(self, request: ActiveRequest, compiled: Future[MakeMatcher] | None = None) -> None:
        """Queue a request; one that has a constraint when that is compiled."""
        self._by_name[request.sequence.name] = request
        if compiled is None:
            self.scheduler.add(request.sequence)
        else:
            self._uncompiled[request.sequence.name] = compiled

    def admit_compiled(self) -> list[RequestOutput]:
        """Queue the requests whose constraints are compiled by now; gives those that are refused.

        Where there is nothing else to do it waits a little.
        """
        if not self._uncompiled:
            return []
        busy = self.scheduler.waiting or self.scheduler.running
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
                self.scheduler.add(request.sequence)
        return refused

    def prepare_cache(self) -> None:
        """Copy and clear the blocks of the cache that the next step needs so; before it runs."""
        changes = self.scheduler.blocks.take_changes()
        if changes is None:
            return
        try:
            self._change_blocks(changes)
        except EngineEndedError:
            raise
        except Exception as error:  # no second try: what was copied may be overwritten
            raise EngineError(f"blocks of the cache could not be copied: {error}") from error

    def fork(self, request: ActiveRequest, name: str, token: int) -> None:
        """Begin a held request with the tokens of another and one more; it shares their blocks."""
        other = self._by_name[name] = request.fork(name, token)
        self.scheduler.fork(request.sequence, other.sequence)

    def take_candidates(self) -> dict[str, Logprobs]:
        """What held requests may go on with: {token: log probability}; given once."""
        found, self.candidates = self.candidates, {}
        return found

    def finish(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
    ) -> RequestOutput:
        """End a request and take its blocks back; `error` says why where the reason is that."""
        if self._uncompiled.pop(request.sequence.name, None) is None:
            self.scheduler.remove(request.sequence, failed=reason == "error")
        del self._by_name[request.sequence.name]
        self.candidates.pop(request.sequence.name, None)
        drafter = self.scheduler.drafter
        if drafter is not None and reason != "error":
            drafter.proposer.note_end([*request.prompt, *request.tokens], len(request.prompt))
        return request.close(reason, error, param)

    def ask_for_less(self, error: Exception) -> list[RequestOutput]:
        """After a step for which memory was too small, make those to come smaller.

        First of fewer tokens; where each has one at most, of fewer requests. Gives those that had
        to end: the newest half of what runs.
        """
        scheduler = self.scheduler
        if scheduler.max_batched_tokens > scheduler.max_batch_size:
            half = scheduler.max_batched_tokens // 2
            scheduler.max_batched_tokens = max(half, scheduler.max_batch_size)
            return []
        reason = f"memory was too small for a step ({error}); older requests went on"
        newest = sorted(scheduler.running, key=lambda sequence: sequence.order)
        newest = newest[-max(1, len(newest) // 2) :]
        return [self.finish(self[sequence.name], "error", reason) for sequence in newest]

    def drop(self) -> None:
        """Forget all of them, and whatever is cached, after a step that failed."""
        for name, request in self._by_name.items():
            if name not in self._uncompiled:
                self.scheduler.remove(request.sequence, failed=True)
        self._uncompiled.clear()
        self.scheduler.blocks.forget()
        self._by_name.clear()
        self.candidates.clear()


def _as_now(items: list[Item]) -> ListView[Item]:
    return ListView(items, len(items))
