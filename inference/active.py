"""A request while it runs: its tokens, its text, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inference.detokenizer import Detokenizer
from inference.request import FinishReason, RequestOutput, SamplingParams
from inference.sampler import sample, top_logprobs
from inference.scheduler import Sequence as TokenSequence
from inference.scheduler import Slice


class ActiveRequest:
    """State of one request between its arrival and its end.

    Args:
        name: The request's.
        prompt: Its token ids.
        params: How it is decoded.
        tokenizer: A transformers tokenizer.
        ends: Tokens that end it.
        limit: Most tokens of prompt and output.

    Attributes:
        sequence: Its tokens, for the scheduler.
        output: What it has so far.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        ends: frozenset[int],
        limit: int,
    ) -> None:
        self.sequence = TokenSequence(name, list(prompt))
        self.output = RequestOutput(name, list(prompt), arrival=time.perf_counter())
        self.output.logprobs = None if params.logprobs is None else []
        self.output.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self._params, self._ends, self._limit = params, ends, limit
        self._detokenizer = Detokenizer(tokenizer, params.stop)
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not yet complete."""
        found = self.output.prompt_logprobs
        return found is not None and len(found) < len(self.output.prompt_token_ids)

    def note_prompt(self, part: Slice, logits: Tensor) -> None:
        """Take the log probabilities of prompt tokens from the logits of a slice's tokens."""
        prompt, found = self.output.prompt_token_ids, self.output.prompt_logprobs
        assert found is not None
        for row, position in zip(logits, range(part.start + 1, len(prompt)), strict=False):
            if position == len(found):  # not yet known from before a preemption
                number = self._params.prompt_logprobs or 0
                found.append(top_logprobs(row, prompt[position], number))

    def take(self, logits: Tensor) -> FinishReason | None:
        """Choose the next token from logits [vocabulary]; the reason where it is the last."""
        params, output = self._params, self.output
        made = len(output.token_ids)
        forbidden = sorted(self._ends) if made < params.min_tokens else ()
        prompt = output.prompt_token_ids
        token = sample(logits, prompt, output.token_ids, params, forbidden, self._generator)
        if output.logprobs is not None:
            output.logprobs.append(top_logprobs(logits, token, params.logprobs or 0))
        output.token_ids.append(token)
        output.token_times.append(time.perf_counter())
        self.sequence.tokens.append(token)
        if token in self._ends:
            return "stop"
        self._detokenizer.add(token)
        if self._detokenizer.stopped and made + 1 >= params.min_tokens:
            return "stop"
        full = len(self.sequence.tokens) >= self._limit
        return "length" if made + 1 >= params.max_tokens or full else None

    def close(self, reason: FinishReason) -> RequestOutput:
        """End it; gives its final state."""
        self._detokenizer.finish()
        if self._detokenizer.stopped and reason == "length":
            reason = "stop"  # what was held back completed a stop text
        self.output.finish_reason = reason
        return self.snapshot()

    def snapshot(self) -> RequestOutput:
        """Its state as it is now, safe from later steps."""
        output, text = self.output, self._detokenizer.text
        output.delta, output.text = text[len(output.text) :], text
        return replace(
            output,
            token_ids=list(output.token_ids),
            token_times=list(output.token_times),
            logprobs=None if output.logprobs is None else list(output.logprobs),
        )
