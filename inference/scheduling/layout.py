"""Where the tokens of a step stand: in their sequences, and in the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Slice
from kernels.attention_inputs import KV_BLOCK


class BatchLayout(NamedTuple):
    """The tokens of slices, one slice after another.

    Attributes:
        ids: Id of each token.
        positions: Position of each token in its sequence.
        slots: Where each token's K and V go in the cache: block * 64 + offset.
        tables: Blocks of each sequence.
        contexts: Tokens of each sequence in the cache after the step.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    tables: list[list[int]]
    contexts: list[int]


def lay_out(slices: Sequence[Slice], blocks: BlockManager) -> BatchLayout:
    """Lay out the tokens of a step.

    Args:
        slices: What runs.
        blocks: Which blocks of the cache each sequence holds.
    """
    found = BatchLayout([], [], [], [blocks.table(part.sequence.name) for part in slices], [])
    for part, table in zip(slices, found.tables, strict=True):
        span = range(part.start, part.start + part.count)
        found.ids.extend(part.sequence.tokens[span.start : span.stop])
        found.positions.extend(span)
        found.slots.extend(table[p // KV_BLOCK] * KV_BLOCK + p % KV_BLOCK for p in span)
        found.contexts.append(span.stop)
    return found
