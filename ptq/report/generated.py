"""What both models write from the same beginnings: texts to be read, and how many drafts hold.

Drafts are those of the layer with which a model predicts further tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from formats.errors import EngineError
from formats.scheme import Strict
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.speculate.chain import Target
from inference.speculate.counts import DraftCounts
from inference.speculate.methods.mtp import METHOD

COMPLETED = 48  # tokens of a prompt, and after it
CAPTION = 200  # characters of a prompt that are shown
DEPTH, DRAFTED_PROMPT, DRAFTED_NEW = 3, 32, 64  # drafts of a step; tokens, likewise

log = logging.getLogger(__name__)


class Completion(Strict):
    """Greedy completions of one prompt.

    Attributes:
        common: Characters at the start of both that are the same.
    """

    prompt: str
    original: str
    quantized: str
    common: int

    @property
    def caption(self) -> str:
        """The end of the prompt, to stand over both."""
        return f"… {self.prompt[-CAPTION:].strip()}"


def complete(
    original: Engine, quantized: Engine, sequences: Sequence[Tensor]
) -> tuple[Completion, ...]:
    """Let both models complete the start of each sequence.

    Args:
        sequences: Token ids, int64 [T] each.
    """
    longest = original.config.max_model_len
    assert longest is not None
    longest = min(longest, max(map(len, sequences), default=longest))
    new = min(COMPLETED, longest // 2)
    prompts = [ids[: min(COMPLETED, longest - new)].tolist() for ids in sequences]
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


class DraftPair(Strict):
    """Mean tokens of a sequence in a step with `DEPTH` drafts; 1 where none is accepted."""

    original: float
    quantized: float


def measure_drafts(
    original: Engine, quantized: Engine, sequences: Sequence[Tensor]
) -> DraftPair | None:
    """Let both models go on from the start of each sequence, greedily, with drafts of their layer.

    Args:
        sequences: Token ids, int64 [T] each.

    Returns:
        None where one of them has no such layer, or none that runs here.
    """
    if not sequences or not all(map(_drafts, (original, quantized))):
        return None
    prompts = [ids[:DRAFTED_PROMPT].tolist() for ids in sequences]
    try:
        before, after = (_tokens_a_step(engine, prompts) for engine in (original, quantized))
    except EngineError as error:
        log.warning("drafts were not measured: %s", error)
        return None
    return DraftPair(original=before, quantized=after)


def _drafts(engine: Engine) -> bool:
    return engine.backend.runs_drafters and bool(engine.checkpoint.predicting_layers)


def _tokens_a_step(engine: Engine, prompts: list[list[int]]) -> float:
    longest = engine.config.max_model_len
    assert longest is not None
    vocabulary = engine.model.config.vocab_size
    own = (engine.config, engine.backend, engine.model, engine.checkpoint)
    engine.speculate_by(METHOD.make(None, Target(engine.tokenizer, vocabulary, *own)), DEPTH)
    try:
        new = min(DRAFTED_NEW, longest // 2)
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        engine.generate([ids[: longest - new] for ids in prompts], params)
        return DraftCounts.of(engine.speculation).tokens_per_step
    finally:
        engine.speculate_by(None)
