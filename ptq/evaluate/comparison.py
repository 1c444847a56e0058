"""The original and the quantized model compared on one device or several, each with both models.

`report_devices` says where both run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from calibrate.data import TokenSet
from calibrate.workers import Workers
from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import PTQError
from inference.accuracy import Accuracy, Scorer, SequenceScores, check_sequences, score, summarize
from inference.backend import choose_backend
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from inference.transformers_code.model import read_shape
from ptq.plan.machine import on_gpu
from ptq.recipe.schema import DevicesSpec, Recipe, SpeedSpec

Pair = tuple[Scorer, Scorer]  # the original and what is judged


def engine_config(evaluation: TokenSet, speed: SpeedSpec | None, far: int = 0) -> EngineConfig:
    """Room for the longest sequence, one of `far` tokens too, and for the measurement of speed at
    once."""
    both = (evaluation, evaluation.also or evaluation)
    longest = max(2, far, *(tokens.ids.shape[1] for tokens in both))
    places, blocks = 1, 1
    if speed is not None:
        total = speed.prompt_tokens + speed.new_tokens
        longest, places = max(longest, total), speed.batch
        blocks = places * blocks_for(total)
    return EngineConfig(
        max_batch_size=places,
        max_model_len=longest,
        kv_blocks=max(blocks, blocks_for(longest)),
        prefix_cache=False,  # each run of a load is to compute its prompts
    )


def open_both(
    folders: tuple[Path, Path], config: EngineConfig, device: str
) -> tuple[Engine, Engine]:
    """The original and the quantized model on a device, by their folders."""
    original, quantized = (
        Engine.from_pretrained(folder, config=config, device=device) for folder in folders
    )
    return original, quantized


def compare_on(
    devices: Sequence[str],
    load: Callable[[str], Pair],
    sequences: Sequence[Tensor],
    *,
    progress: bool = False,
) -> Accuracy:
    """`inference.accuracy.compare`, the sequences spread over devices; the figures are the same.

    Args:
        devices: Where they run: `cpu`, or GPUs of one kind.
        load: Gives both models on a device; called in the thread that scores with them.
        sequences: Token ids, int64 [T] each, T at least 2.

    Raises:
        RequestError: there is no sequence, or one has no token to predict.
        EngineError: logits hold NaN or infinity, or the vocabularies differ.
    """
    check_sequences(sequences)
    workers = Workers([torch.device(device) for device in devices])
    shown = bar(title="Comparing", unit="sequence", total=len(sequences), shown=progress)

    def run(worker: int) -> list[SequenceScores]:
        pair, found = load(devices[worker]), list[SequenceScores]()
        for i in range(worker, len(sequences), len(workers)):
            workers.check()
            found.append(score(*pair, sequences[i], i))
            shown.update()
        return found

    with shown:
        found = workers.each("comparing both models", run)
    count = len(workers)
    return summarize([found[i % count][i // count] for i in range(len(sequences))])


def report_devices(recipe: Recipe) -> tuple[str, ...]:
    """Where both models run to be compared, by torch's names; `auto` follows the recipe's own
    device, but for a GPU or a model that the engine's kernels do not take.
    """
    chosen = recipe.report.device
    if chosen == "auto":
        own = recipe.device
        chosen = own if isinstance(own, DevicesSpec) else "cuda" if on_gpu(recipe) else "cpu"
        if chosen == "cuda" and not _runs(recipe):
            return ("cpu",)
    if isinstance(chosen, str):
        return (chosen,)
    return tuple(f"cuda:{index}" for index in range(chosen.gpus)) if chosen.gpus else ("cpu",)


def _runs(recipe: Recipe) -> bool:
    """Whether the engine runs the recipe's model on a GPU here."""
    try:
        checkpoint = Checkpoint.open(recipe.model.folder)
        read_shape(checkpoint, choose_backend("cuda", checkpoint))
    except PTQError:
        return False
    return True
