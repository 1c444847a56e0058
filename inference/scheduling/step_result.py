"""What a step of the engine gave, for whoever drives it step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inference.scheduling.request import RequestOutput

Logprobs = Mapping[int, float]


@dataclass(frozen=True)
class StepResult:
    """What a step gave: one object a step instead of one a request.

    Attributes:
        names: Requests that gained a token, each once.
        tokens: The token that each of them gained, in the order of `names`.
        logprobs: Of requests that want them: {token: log probability} for that token.
        prompt_logprobs: Of requests that want them, once all of a prompt's are known: an entry for
            each of its tokens, None for the first.
        finished: Requests that ended, in their final state.
        candidates: Of requests that are held (`Engine.hold`) and wait for their next token: {token:
            log probability} of the likeliest, most likely first.
    """

    names: Sequence[str] = ()
    tokens: Sequence[int] = ()
    logprobs: Mapping[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[Logprobs | None]] = field(default_factory=dict)
    finished: Sequence[RequestOutput] = ()
    candidates: Mapping[str, Logprobs] = field(default_factory=dict)
