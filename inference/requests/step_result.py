"""What a step of the engine gave, for whoever drives it step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from inference.requests.request import RequestOutput

Logprobs = Mapping[int, float]


@dataclass
class StepResult:
    """What a step gave: one object a step instead of one a request.

    Attributes:
        names: Requests that gained a token; one is there as often as it gained one, in order.
        tokens: The token that each of them gained, in the order of `names`.
        logprobs: Of requests that want them: the name and {token: log probability} for each of
            their tokens, in order.
        prompt_logprobs: Of requests that want them, once all of a prompt's are known: an entry for
            each of its tokens, None for the first.
        finished: Requests that ended, in their final state.
        candidates: Of requests that are held (`Engine.hold`) and wait for their next token: {token:
            log probability} of the likeliest, most likely first.
        drafts: Of requests that had drafts in the step: the name, how many, and how many of them
            came; these are the first of the tokens that it gained.
    """

    names: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, Logprobs]] = field(default_factory=list)
    prompt_logprobs: dict[str, Sequence[Logprobs | None]] = field(default_factory=dict)
    finished: list[RequestOutput] = field(default_factory=list)
    candidates: dict[str, Logprobs] = field(default_factory=dict)
    drafts: list[tuple[str, int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.names or self.finished or self.candidates)

    def split(self, names: Set[str]) -> tuple[StepResult, StepResult]:
        """What it tells of some requests, and of the others; without candidates."""
        parts = StepResult(), StepResult()
        for name, token in zip(self.names, self.tokens, strict=True):
            part = parts[name not in names]
            part.names.append(name)
            part.tokens.append(token)
        for name, own in self.logprobs:
            parts[name not in names].logprobs.append((name, own))
        for name, all_of_prompt in self.prompt_logprobs.items():
            parts[name not in names].prompt_logprobs[name] = all_of_prompt
        for output in self.finished:
            parts[output.request_id not in names].finished.append(output)
        for own in self.drafts:
            parts[own[0] not in names].drafts.append(own)
        return parts

    def __iadd__(self, other: StepResult) -> StepResult:
        """Take what another part of the same step gave."""
        self.names += other.names
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.prompt_logprobs |= other.prompt_logprobs
        self.finished += other.finished
        self.candidates |= other.candidates
        self.drafts += other.drafts
        return self
