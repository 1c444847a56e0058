"""The tensors of a step on a CPU: planned from its slices, executed without a look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inference.scheduling.blocks import BlockManager
from inference.scheduling.layout import lay_out
from inference.scheduling.scheduler import Slice


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T of S sequences.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        slots: int64 [T], where K and V go in the cache.
        block_tables: int64 [S, blocks].
        query_start: int64 [S + 1].
        context_len: int64 [S].
        rows: int64 [R], the tokens whose logits are wanted.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_len: Tensor
    rows: Tensor


def plan_step(
    slices: Sequence[Slice], blocks: BlockManager, whole: set[str]
) -> tuple[Batch, list[int]]:
    """Lay out a step.

    Args:
        slices: What runs.
        blocks: Which blocks of the cache each sequence holds.
        whole: Names of sequences whose logits are wanted for all tokens of their slice; of others
            only for the last, and only if it is the sequence's last.

    Returns:
        The batch, and how many rows of its logits belong to each slice, in order.
    """
    counts = [part.count if part.sequence.name in whole else int(part.samples) for part in slices]
    starts = [0, *accumulate(part.count for part in slices)]
    rows = [row for end, n in zip(starts[1:], counts, strict=True) for row in range(end - n, end)]
    own = lay_out(slices, blocks)
    widest = max(map(len, own.tables))
    batch = Batch(
        ids=torch.tensor(own.ids),
        positions=torch.tensor(own.positions),
        slots=torch.tensor(own.slots),
        block_tables=torch.tensor([[*table, *[0] * (widest - len(table))] for table in own.tables]),
        query_start=torch.tensor(starts),
        context_len=torch.tensor(own.contexts),
        rows=torch.tensor(rows, dtype=torch.int64),
    )
    return batch, counts
