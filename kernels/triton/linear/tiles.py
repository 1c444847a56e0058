"""What the kernels of few rows share: which rows a program multiplies, where its sums go.

The weight is the left operand, so that the tile of a sum is transposed: [OUTPUTS, ROWS].
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.common import sum_splits, wait


@triton.jit
def rows_of_tile(
    row_tile, M, experts, pairs,
    SHARE: tl.constexpr, ROWS: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of a tile: (its expert, rows of the result, rows of x, whether they exist).

    Without `experts` all rows are those of one weight. SHARE pairs read a row of x. If WIDE, rows
    of x are int64. If not READY, the kernel ahead writes which rows are whose.
    """
    m = row_tile * ROWS + tl.arange(0, ROWS)
    expert, row, there = row_tile, m, m < M
    if experts is not None:
        if not READY:
            wait(OVERLAP)
        expert = tl.load(experts + row_tile)
        if pairs is not None:
            m = tl.load(pairs + m)
        else:  # each pair is a tile of its own
            m = tl.where(m == row_tile * ROWS, row_tile, -1)
        row, there = m // SHARE, m >= 0
    if WIDE:
        row = row.to(tl.int64)
    return expert, m, row, there


@triton.jit
def sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS: tl.constexpr):
    """The sum of a tile's splits, and whether this program has it; see `common.sum_splits`."""
    OUTPUTS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    number = row_tile * tl.num_programs(0) + tile
    return sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)


@triton.jit
def store_tile(y, out, m, n, N, real):
    """Results of outputs n and rows m of the result to memory, in its type."""
    place = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(place, y.to(out.dtype.element_ty), mask=real)
