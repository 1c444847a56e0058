"""The original and the quantized model compared on one device or several, each with both models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibrate.workers import Workers
from formats.progress import bar
from inference.accuracy import Accuracy, Scorer, SequenceScores, check_sequences, score, summarize

Pair = tuple[Scorer, Scorer]  # the original and what is judged


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
        progress: Show a progress bar.

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
