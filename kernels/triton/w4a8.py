"""W4A8: 4-bit weights in groups of 128 inputs, int8 activations with a scale a row or tensor.

    y[m, n] = sx[m] sum_g s[g, n] (sum_{k in g} xq[m, k] q[n, k]) + b[n],        q in [-8, 7].

As in `kernels.triton.w4a16` the weight is the left operand and goes through registers alone, but
to the int8 tensor cores: a byte holds input k as the low and k + 16 as the high half, and a shift
and two masks turn four bytes into eight int8 of value 16 q, sign included. A group's sum is exact
in int32; the sixteenth is taken in the epilogue. A packed tile is 64 outputs by 128 inputs, 4 KB:
byte b of word j of quad i holds input 32 j + 4 i + b. Tiles are stored [K / 128, N / 64, 4096].
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import ASM, Workspace, require, sum_splits
from kernels.triton.tuning import Tile, gemm_tile
from kernels.triton.w4a16 import GROUP, check_int4

SIXTEENFOLD = tl.constexpr("""{ .reg .b32 t;
shl.b32 t, $2, 4;
and.b32 $0, t, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0; }""")


@dataclass(frozen=True)
class W4A8Weight:
    """A weight packed for `w4a8_linear`.

    Attributes:
        packed: int8 [K / 128, N / 64, 4096], two weights a byte.
        scale: fp16, bf16 or fp32 [K / 128, N].
        bias: fp32 [N] or None.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(t.nbytes for t in (self.packed, self.scale, self.bias) if t is not None)


def pack_w4a8(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> W4A8Weight:
    """Lay a quantized weight out for `w4a8_linear`, on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, K / 128]; its type is kept. fp32 is faster: of tiles of fewer than 256
            outputs 16-bit scales are too small for asynchronous loads, and are waited for.
        bias: Float [N] or None.

    Raises:
        ValueError: a shape, type or value is another.
    """
    check_int4(q, scale)
    outputs, inputs = q.shape
    halves = (q & 15).view(torch.uint8).view(outputs // 64, 4, 2, 8, inputs // GROUP, 4, 2, 4, 4)
    low, high = halves.unbind(6)  # [tile, a, b, c, g, j, quad, byte], n = 16 a + 8 b + c
    packed = (low | (high << 4)).permute(4, 0, 2, 1, 3, 6, 5, 7)
    packed = packed.reshape(inputs // GROUP, outputs // 64, 4096).view(torch.int8)
    bias = None if bias is None else bias.float().contiguous()
    return W4A8Weight(packed.contiguous(), scale.t().contiguous(), bias)


@triton.jit
def operand(packed):
    """Packed bytes [tiles, 4096] -> sixteenfold weights int8 [outputs, 128]."""
    tiles: tl.constexpr = packed.shape[0]
    if ASM:
        low, high = tl.inline_asm_elementwise(
            SIXTEENFOLD, "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low, high = packed << 4, packed & -16
    both = tl.join(low, high).reshape(tiles, 2, 4, 8, 4, 4, 4, 2)  # b, a, c, quad, j, byte, half
    return both.permute(0, 2, 1, 3, 5, 7, 4, 6).reshape(tiles * 64, 128)


@triton.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x, packed, x_scale, scale, bias, out, parts, arrivals, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows)."""
    tile, split, strip = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // 128, SPLITS)
    first = split * share
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    real = (m < M)[None, :]
    tiles = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * 4096
    tiles = packed + tiles + tl.arange(0, 4096)[None, :]
    columns = x + m[None, :] * K + tl.arange(0, 128)[:, None]  # [128, ROWS], x transposed
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        w = tl.load(tiles + g * (N * 64), eviction_policy="evict_first")
        s = tl.load(scale + g * N + n).to(tl.float32)
        xt = tl.load(columns + g * 128, mask=real, other=0)
        exact = tl.dot(operand(w), xt, out_dtype=tl.int32)
        acc += exact.to(tl.float32) * s[:, None]
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = strip * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        sx = tl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0) * 0.0625
        y = acc * sx[None, :]
        if BIAS:
            y += tl.load(bias + n)[:, None]
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=real)


def w4a8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: W4A8Weight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + bias of int8 x.

    Args:
        xq: int8 [M, K], contiguous.
        x_scale: fp32, one element or [M, 1].
        weight: From `pack_w4a8`, on the device of `xq`.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result.
        tile: How to cut it; by default the device's table says.

    Returns:
        [M, N] in `out_dtype`; sums of groups exact, sums over groups in fp32.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    (rows, inputs), outputs = xq.shape, weight.scale.shape[1]
    require(
        xq.dtype == torch.int8 and xq.is_contiguous(),
        f"x is {xq.dtype}; needed is contiguous int8",
    )
    known = weight.packed.shape[0] * GROUP
    require(inputs == known, f"x has {inputs} inputs, the weight {known}")
    require(x_scale.numel() in (1, rows), f"{x_scale.numel()} scales for {rows} rows of x")
    out = torch.empty((rows, outputs), dtype=out_dtype, device=xq.device)
    if rows == 0:
        return out
    tile = tile or gemm_tile("w4a8", xq.device, rows, outputs, inputs)
    require(outputs % tile.outputs == 0, f"{outputs} outputs are no multiple of {tile.outputs}")
    grid = (outputs // tile.outputs, tile.splits, triton.cdiv(rows, tile.rows))
    if tile.splits > 1:
        tiles = grid[0] * grid[2]
        workspace.check(tiles * tile.splits * tile.outputs * tile.rows, tiles)
    w4a8_kernel[grid](
        xq, weight.packed, x_scale, weight.scale, weight.bias, out, workspace.parts,
        workspace.arrivals, rows, outputs, inputs, OUTPUTS=tile.outputs, ROWS=tile.rows,
        SPLITS=tile.splits, STAGES=tile.stages, PER_ROW=int(x_scale.numel() > 1),
        BIAS=weight.bias is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
