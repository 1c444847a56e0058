"""W16A16: fp16 or bf16 weights and activations, few rows.

    y[m, n] = sum_k x[m, k] w[n, k] + b[n],    sums in fp32

The weight stays [N, K], where cuBLAS, which takes calls of many rows, reads it too. Its bytes are
all that counts: a program reads tiles of 64 outputs by 256 or 512 bytes, by TMA where there is one,
as many at a time as shared memory holds. The weight is the left operand (wgmma wants 64 rows there,
x has fewer), so that the tile of the sum is transposed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.common import (
    AHEAD,
    Workspace,
    announce,
    capability,
    overlap,
    prefetch_lines,
    require,
    sum_splits,
    takes_wide_steps,
    wait,
)
from kernels.triton.experts.sorting import SortedRows, rows_of, rows_of_tile, tile_of
from kernels.triton.linear.packed import BLOCK, check_inputs, grid_of
from kernels.triton.tuning import Tile

MANY_OUTPUTS = 16384  # of as many, cuBLAS is behind up to 64 rows; of fewer up to 16
FLOATS = (torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["M"])
def w16a16_kernel(
    x, weight, columns, tiles, bias, out, parts, arrivals, experts, pairs, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows).

    `columns` and `tiles` are TMA descriptors of x and weight, or None: then loads are by pointers.
    Rows of an expert lie anywhere in x, and have no descriptor.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // BLOCK, SPLITS)
    first = split * share
    k = tl.arange(0, BLOCK)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, m, row, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    above = tile * OUTPUTS  # rows of the weights
    if experts is not None:
        if expert < 0:
            return
        above += expert * N
        weight += expert.to(tl.int64) * N * K
        if BIAS:
            bias += expert * N
    real = there[None, :]
    rows_of_weight = weight + n.to(tl.int64)[:, None] * K
    if OVERLAP:
        line = tl.arange(0, BLOCK // 64) * 64
        for i in tl.static_range(AHEAD):
            if first + i < K // BLOCK:
                prefetch_lines(rows_of_weight + (first + i) * BLOCK + line[None, :])
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, K // BLOCK), num_stages=STAGES):
        if tiles is not None:
            w = tiles.load([above, g * BLOCK])
        else:
            w = tl.load(rows_of_weight + g * BLOCK + k[None, :], eviction_policy="evict_first")
        if columns is not None:
            xt = columns.load([row_tile * ROWS, g * BLOCK]).T
        else:
            xt = tl.load(x + row[None, :] * K + g * BLOCK + k[:, None], mask=real, other=0.0)
        acc = tl.dot(w, xt, acc)
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = row_tile * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        if BIAS:
            acc += tl.load(bias + n)[:, None].to(tl.float32)
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=real)


def fits(weight: Tensor) -> bool:
    """Whether tiles divide a weight, and it is of a type that `w16a16_linear` takes."""
    outputs, inputs = weight.shape
    contiguous = weight.dtype in FLOATS and weight.is_contiguous()
    return contiguous and outputs % 64 == 0 and inputs % BLOCK == 0


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `w16a16_linear` is for a product on a GPU: few rows, and sizes that tiles divide."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= (64 if weight.shape[0] >= MANY_OUTPUTS else 16)
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and fits(weight)
    )


def w16a16_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """x W^T + bias.

    Args:
        x: fp16 or bf16 [M, K], contiguous.
        weight: [N, K] of that type, contiguous; N a multiple of 64, K of 128.
        bias: Float [N] or None.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result; by default that of x.
        tile: How to cut it; by default the device's table says.
        sorted_rows: As in `kernels.triton.linear.w4a16.w4a16_linear`.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    require(
        weight.dim() == 2 and fits(weight),
        f"weight is {weight.dtype} {tuple(weight.shape)}; needed is contiguous float16 or bfloat16 "
        f"[N, K], N in 64s and K in {BLOCK}s",
    )
    (rows, places), (outputs, inputs) = rows_of(x, sorted_rows), weight.shape
    check_inputs(x, (weight.dtype,), inputs)
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    tma = capability() >= 90
    if tile is None:
        tile = tile_of("w16a16", x, outputs, inputs, sorted_rows)
        if not takes_wide_steps(x.device):
            tile = replace(tile, stages=min(tile.stages, 4), inputs=BLOCK)
    require(inputs % tile.inputs == 0, f"{inputs} inputs are no multiple of {tile.inputs}")
    columns = tiles = None
    if tma:
        if sorted_rows is None:
            columns = TensorDescriptor.from_tensor(x, [tile.rows, tile.inputs])
        lines = outputs * (1 if sorted_rows is None else sorted_rows.total)
        block = [tile.outputs, tile.inputs]
        tiles = TensorDescriptor(weight, [lines, inputs], [inputs, 1], block)
    w16a16_kernel[grid_of(tile, rows, outputs, workspace, sorted_rows)](
        x, weight, columns, tiles, bias, out, workspace.parts, workspace.arrivals,
        M=rows, N=outputs, K=inputs, **places,
        OUTPUTS=tile.outputs, ROWS=tile.rows, BLOCK=tile.inputs, SPLITS=tile.splits,
        STAGES=tile.stages, BIAS=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, **overlap(),
    )  # fmt: skip
    return out
