"""One request while it runs: its tokens, its text, and what ends it."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from inference.requests.detokenizer import Detokenizer, LateText
from inference.requests.request import FinishReason, Item, ListView, RequestOutput, SamplingParams
from inference.scheduling.sampler import biases_of, log_min_p, sample, top_logprobs
from inference.scheduling.sequence import MOST_EDITS, NEVER, Draw, Terms
from inference.scheduling.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from inference.structured.compiler import GrammarMatcher


class ActiveRequest:
    """State of one request between its arrival and its end.

    Args:
        prompt: Its token ids.
        params: How it is decoded.
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


def _as_now(items: list[Item]) -> ListView[Item]:
    return ListView(items, len(items))
