"""Where the tokens of a step stand: in their sequences, and in the paged cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inference.scheduling.batch import Ints
from inference.scheduling.work import Work
from kernels.attention_inputs import KV_BLOCK


class BatchLayout(NamedTuple):
    """The tokens of a step, one sequence's after another's.

    Attributes:
        ids: Id of each token; negative where it is on its way.
        positions: Position of each token in its sequence.
        slots: Where each token's K and V go in the cache: block * 64 + offset.
        owners: Place of each token's sequence.
        contexts: Tokens of each sequence in the cache after the step.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    owners: Ints
    contexts: Ints


def lay_out(work: Work) -> BatchLayout:
    """Lay out the tokens of a step."""
    owners, positions, counts = work.places, work.starts, work.counts
    if work.tokens > len(work):
        owners = np.repeat(owners, counts)
        before = np.cumsum(counts) - counts
        positions = np.arange(work.tokens) + np.repeat(work.starts - before, counts)
    batch = work.batch
    blocks = batch.tables[owners, positions // KV_BLOCK].astype(np.int64)
    return BatchLayout(
        ids=batch.ids[owners, positions].astype(np.int64),
        positions=positions,
        slots=blocks * KV_BLOCK + positions % KV_BLOCK,
        owners=owners,
        contexts=work.starts + counts,
    )
