"""What both models make of the same beginnings: something to read, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from formats.scheme import Strict
from inference.engine import Engine
from inference.requests.request import SamplingParams

PROMPT, NEW = 48, 48  # tokens


class Completion(Strict):
    """Greedy completions of one prompt.

    Attributes:
        prompt: The start of an evaluation sequence.
        original: How the original goes on.
        quantized: How the quantized model goes on.
        common: Characters at the start of both that are the same.
    """

    prompt: str
    original: str
    quantized: str
    common: int


def complete(
    original: Engine, quantized: Engine, sequences: Sequence[Tensor]
) -> tuple[Completion, ...]:
    """Let both models complete the start of each sequence.

    Args:
        original: The reference.
        quantized: What is judged.
        sequences: Token ids, int64 [T] each.
    """
    longest = original.config.max_model_len
    assert longest is not None
    new = min(NEW, longest // 2)
    prompts = [ids[: min(PROMPT, longest - new)].tolist() for ids in sequences]
    params = SamplingParams(max_tokens=new)
    texts = [
        [output.text for output in engine.generate(prompts, params)]
        for engine in (original, quantized)
    ]
    return tuple(
        Completion(
            prompt=original.tokenizer.decode(prompt),
            original=first,
            quantized=second,
            common=_common(first, second),
        )
        for prompt, first, second in zip(prompts, *texts, strict=True)
    )


def _common(first: str, second: str) -> int:
    """Characters at the start of two texts that are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
