"""From a step's slices to logits: the tensors of a batch, and the model's run on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from inference.models.decoder import Batch, LlamaModel
from inference.models.kv_cache import BlockManager
from inference.scheduling.scheduler import Slice
from kernels.attention_inputs import KV_BLOCK, KVPool


class Layout(NamedTuple):
    """Where the tokens of a step stand.

    Attributes:
        ids: Of each token.
        positions: In its sequence.
        slots: Where its K and V go in the cache.
        tables: Blocks of each sequence.
        contexts: Tokens of each sequence in the cache after the step.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    tables: list[list[int]]
    contexts: list[int]


def lay_out(slices: Sequence[Slice], blocks: BlockManager) -> Layout:
    """The tokens of slices, one slice after another; arguments as in `make_batch`."""
    found = Layout([], [], [], [blocks.table(part.sequence.name) for part in slices], [])
    for part, table in zip(slices, found.tables, strict=True):
        span = range(part.start, part.start + part.count)
        found.ids.extend(part.sequence.tokens[span.start : span.stop])
        found.positions.extend(span)
        found.slots.extend(table[p // KV_BLOCK] * KV_BLOCK + p % KV_BLOCK for p in span)
        found.contexts.append(span.stop)
    return found


def make_batch(slices: Sequence[Slice], blocks: BlockManager, rows: Sequence[int]) -> Batch:
    """Lay out the tokens of a step.

    Args:
        slices: What runs.
        blocks: Whose blocks are whose.
        rows: Tokens of the batch, counted over all slices, whose logits are wanted.
    """
    ids, positions, slots, tables, contexts = lay_out(slices, blocks)
    widest = max(map(len, tables))
    return Batch(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_tables=torch.tensor([[*table, *[0] * (widest - len(table))] for table in tables]),
        query_start=torch.tensor([0, *accumulate(part.count for part in slices)]),
        context_len=torch.tensor(contexts),
        rows=torch.tensor(rows, dtype=torch.int64),
    )


def run_slices(
    model: LlamaModel,
    pools: Sequence[KVPool],
    slices: Sequence[Slice],
    blocks: BlockManager,
    whole: set[str],
) -> dict[str, Tensor]:
    """Run a step.

    Args:
        model: The decoder.
        pools: Its cache.
        slices: What runs.
        blocks: Whose blocks are whose.
        whole: Names of sequences whose logits are wanted for all tokens of their slice; of others
            only for the last, and only if it is the sequence's last.

    Returns:
        Logits fp32 [rows, vocabulary] by sequence name, where any are wanted.
    """
    rows, counts, start = [], {}, 0
    for part in slices:
        name = part.sequence.name
        if name in whole:
            wanted = range(start, start + part.count)
        else:
            wanted = range(start + part.count - 1, start + part.count) if part.samples else ()
        rows += wanted
        counts[name] = len(wanted)
        start += part.count
    logits = model.forward(make_batch(slices, blocks, rows), pools)
    parts = logits.split(list(counts.values()))
    return {name: part for name, part in zip(counts, parts, strict=True) if len(part)}
