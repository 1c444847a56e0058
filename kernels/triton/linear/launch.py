"""What the kernels that multiply few rows share: one grid, one workspace, the same arguments.

Such a kernel has a program for each tile of outputs, split of the inputs and tile of rows. It takes
its own operands, then

    bias, out, parts, arrivals, experts, pairs, M, N, K

and by name OUTPUTS, ROWS, SPLITS, STAGES, BIAS, SHARE, READY, WIDE and OVERLAP. Here is also found
which rows a program multiplies, and where its sums go. The weight is the left operand, so that the
tile of a sum is transposed: [OUTPUTS, ROWS].
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Workspace, capability, overlap, require, sum_splits, wait
from kernels.triton.experts import SortedRows
from kernels.triton.linear.packing import BLOCK
from kernels.triton.tuning import Tile, gemm_tile

COUNTED = 1 << 31  # elements whose places fit in 32 bits


@dataclass(frozen=True)
class Product:
    """Rows that are to be multiplied by a weight, and where the result goes.

    Attributes:
        x: [M, K], contiguous: rows as they are, or those of tokens or pairs of a mixture.
        x_scale: Scales of x, fp32; None for floats.
        out: [M, N], or a row for each pair.
        workspace: Of the stream that this runs in.
        sorted_rows: Which rows are whose, where the weight is the first of experts'.
    """

    x: Tensor
    x_scale: Tensor | None
    out: Tensor
    workspace: Workspace
    sorted_rows: SortedRows | None = None

    @property
    def per_row(self) -> int:
        """1 if rows have scales of their own, else 0: what row numbers are multiplied by."""
        return int(self.x_scale is not None and self.x_scale.numel() > 1)


def result_rows(x: Tensor, sorted_rows: SortedRows | None) -> int:
    """Rows of a result.

    Raises:
        ValueError: x has a row neither for each pair nor for each token.
    """
    if sorted_rows is None:
        return len(x)
    require(
        len(x) > 0 and sorted_rows.count % len(x) == 0,
        f"x has {len(x)} rows; needed is one for each of {sorted_rows.count} pairs, or for each "
        "token",
    )
    return sorted_rows.count


def tile_for(
    family: str, x: Tensor, outputs: int, inputs: int, sorted_rows: SortedRows | None = None
) -> Tile:
    """The tile of a family's kernel for few rows, for x as it is or by expert."""
    if sorted_rows is None:
        return gemm_tile(family, x.device, len(x), outputs, inputs)
    row_tiles = len(sorted_rows.experts)
    return gemm_tile(family, x.device, sorted_rows.rows, outputs, inputs, row_tiles)


@cache
def fitting(tile: Tile, of_output: int, of_row: int, group: int, memory: int) -> Tile:
    """A tile with as many stages as shared memory of so many bytes has room for.

    Rule and tables know of no zero points, and of no scales of smaller groups than 128. The kernel
    may hold scales twice; one stage is in registers. `of_output` and `of_row` are bytes of a stage.
    """
    scales = 8 * BLOCK // group if group else 0
    stage = tile.outputs * (of_output + scales) + tile.rows * of_row
    return replace(tile, stages=min(tile.stages, memory // stage + 1))


def grid_of(
    tile: Tile,
    rows: int,
    outputs: int,
    workspace: Workspace,
    sorted_rows: SortedRows | None = None,
) -> tuple[int, int, int]:
    """(tiles of outputs, splits, tiles of rows) of a kernel; ValueError where they do not fit."""
    require(
        sorted_rows is None or sorted_rows.rows == tile.rows,
        f"row tiles of {sorted_rows.rows if sorted_rows else 0} rows, of {tile.rows} in {tile}",
    )
    require(outputs % tile.outputs == 0, f"{outputs} outputs are no multiple of {tile.outputs}")
    across = outputs // tile.outputs
    down = -(-rows // tile.rows) if sorted_rows is None else len(sorted_rows.experts)
    if tile.splits > 1:
        tiles = across * down
        workspace.check(tiles * tile.splits * tile.outputs * tile.rows, tiles)
    return across, tile.splits, down


def by_warps(tile: Tile) -> bool:
    """Whether single warps multiply (`mma.sync`), not groups of four (`wgmma`): WARP of kernels."""
    return tile.warps < 4 or capability() != 90


def launch_few_rows(
    kernel: Any,
    operands: Sequence[Any],
    bias: Tensor | None,
    product: Product,
    tile: Tile,
    *,
    exact: bool = False,
    fused: bool = True,
    wide: bool = False,
    padding: int = 0,
    inputs: int | None = None,
    **own: Any,
) -> None:
    """Run a kernel of few rows; see the top of the file.

    Args:
        operands: What it takes first.
        bias: As the weight has it.
        product: What is multiplied.
        exact: Whether sums are of integers.
        fused: Whether the compiler may fuse a product and a sum, which then round once.
        wide: Whether places in the weight need 64 bits; those in x are looked after here.
        padding: Outputs that the weight has beyond N.
        inputs: K of the weight; None: as many as x has.
        own: What the kernel takes by name beyond what all do.

    Raises:
        ValueError: the tile does not fit, or the workspace is too small.
    """
    x, out, workspace, sorted_rows = product.x, product.out, product.workspace, product.sorted_rows
    (rows, outputs), inputs = out.shape, inputs or x.shape[1]
    parts = workspace.parts.view(torch.int32) if exact else workspace.parts
    experts, pairs, share, ready = None, None, 1, False
    if sorted_rows is not None:
        experts, pairs, ready = sorted_rows.experts, sorted_rows.pairs, sorted_rows.metadata_ready
        share = rows // len(x)
    kernel[grid_of(tile, rows, outputs + padding, workspace, sorted_rows)](
        *operands, bias, out, parts, workspace.arrivals, experts, pairs,
        M=rows, N=outputs, K=inputs, SHARE=share, READY=ready, WIDE=wide or x.numel() > COUNTED,
        OUTPUTS=tile.outputs, ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages,
        BIAS=bias is not None and out.is_floating_point(), num_warps=tile.warps,
        num_stages=tile.stages, enable_fp_fusion=fused, **overlap(), **own,
    )  # fmt: skip


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
