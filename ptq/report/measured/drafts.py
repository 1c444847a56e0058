"""What quantizing does to the drafts of the layer with which a model predicts further tokens."""

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

DEPTH, PROMPT, NEW = 3, 32, 64  # drafts of a step; tokens of a prompt, and after it

log = logging.getLogger(__name__)


class DraftPair(Strict):
    """Mean tokens of a sequence in a step with `DEPTH` drafts; 1 where none is accepted."""

    original: float
    quantized: float


def measure_drafts(
    original: Engine, quantized: Engine, sequences: Sequence[Tensor]
) -> DraftPair | None:
    """Let both models go on from the start of each sequence, greedily, with drafts of their layer.

    Args:
        original: The reference.
        quantized: What is judged.
        sequences: Token ids, int64 [T] each.

    Returns:
        None where one of them has no such layer, or none that runs here.
    """
    if not sequences or not all(map(_drafts, (original, quantized))):
        return None
    prompts = [ids[:PROMPT].tolist() for ids in sequences]
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
        new = min(NEW, longest // 2)
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        engine.generate([ids[: longest - new] for ids in prompts], params)
        return DraftCounts.of(engine.speculation).tokens_per_step
    finally:
        engine.speculate_by(None)
