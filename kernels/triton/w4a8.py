"""W4A8: 4-bit weights in groups of inputs, int8 activations with a scale a row or tensor.

    y[m, n] = sx[m] sum_g s[g, n] (sum_{k in g} xq[m, k] (q[n, k] - z[g, n])) + b[n]

As in `kernels.triton.weight_only` the weight is the left operand and goes through registers alone,
but to the int8 tensor cores: a byte holds input k as the low and k + 16 as the high half, and a
shift and two masks turn four bytes into eight int8 of value 16 q, sign included. A group's sum is
exact in int32; the sixteenth is taken in the epilogue. With zero points the halves hold q + 8, and
become eight int8 of value q - z: 128 is set beside each before 8 + z is taken, so that bytes do not
borrow, and cleared after. This is less work than the sums of x that z could be multiplied by.

A packed tile is 64 outputs by the inputs of a group: byte b of word j of quad i holds input
32 j + 4 i + b. Of groups of 32 and 64 a step of the loop takes four and two.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    ASM,
    Workspace,
    announce,
    overlap,
    sum_splits,
    wait,
)
from kernels.triton.tuning import Tile, gemm_tile
from kernels.triton.weights import (
    BLOCK,
    GroupedWeight,
    check_grouped,
    check_input_scale,
    check_inputs,
    grid_of,
    lay_bias,
    lay_scales,
)

SIXTEENFOLD = tl.constexpr("""{ .reg .b32 t;
shl.b32 t, $2, 4;
and.b32 $0, t, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0; }""")
_LESS_ZERO = (
    "lop3.b32 t, {0}, 0x0F0F0F0F, 0x80808080, 0xEA; sub.u32 t, t, $3; xor.b32 {1}, t, 0x80808080;"
)
LESS_ZERO = tl.constexpr(
    "{ .reg .b32 t, u;\nshr.u32 u, $2, 4;\n"
    + f"{_LESS_ZERO.format('$2', '$0')}\n{_LESS_ZERO.format('u', '$1')} }}"
)


class W4A8Weight(GroupedWeight):
    """A weight packed for `w4a8_linear`, two a byte.

    `packed` is int8 [K / 128, 128 / group, N / 64, 32 group].
    """


def pack_w4a8(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W4A8Weight:
    """Lay a quantized weight out for `w4a8_linear`, on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, groups], as `kernels.triton.w4a16.pack_w4a16` takes them.
        bias: Float [N] or None.
        zero_point: int8 [N, groups] in [-8, 7], or None for zeros.

    Raises:
        ValueError: a shape, type or value is another.
    """
    check_grouped(q, scale, zero_point, 4)
    outputs, inputs = q.shape
    scales, group, zeros = lay_scales(scale, zero_point, inputs, 4)
    nibbles = (q + 8 if zeros else q & 15).view(torch.uint8)
    parts = nibbles.reshape(outputs // 64, 4, 2, 8, inputs // group, group // 32, 2, 4, 4)
    low, high = parts.unbind(6)  # [tile, a, b, c, g, j, quad, byte], n = 16 a + 8 b + c
    packed = (low | (high << 4)).permute(4, 0, 2, 1, 3, 6, 5, 7)
    packed = packed.reshape(inputs // BLOCK, BLOCK // group, outputs // 64, 32 * group)
    bias = lay_bias(bias, outputs)
    return W4A8Weight(packed.view(torch.int8).contiguous(), scales, bias, group, zeros)


@triton.jit
def operand(packed, z, ZERO: tl.constexpr):
    """Packed bytes [tiles, 32 group] -> int8 [outputs, group]: 16 q, or q - z if `ZERO`."""
    tiles: tl.constexpr = packed.shape[0]
    words: tl.constexpr = packed.shape[1] // 1024
    if ZERO:
        z = z.to(tl.int8).reshape(tiles, 4, 2, 8).permute(0, 2, 1, 3).reshape(tiles, 64, 1)
        z = tl.broadcast_to(z, (tiles, 64, 16 * words)).reshape(tiles, 1024 * words)
    if ASM and ZERO:
        low, high = tl.inline_asm_elementwise(
            LESS_ZERO, "=r,=r,r,r", [packed, z], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif ASM:
        low, high = tl.inline_asm_elementwise(
            SIXTEENFOLD, "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif ZERO:
        low, high = (packed & 15) - z, ((packed >> 4) & 15) - z
    else:
        low, high = packed << 4, packed & -16
    both = tl.join(low, high)  # b, a, c, quad, j, byte, half
    both = both.reshape(tiles, 2, 4, 8, 4, words, 4, 2)
    return both.permute(0, 2, 1, 3, 5, 7, 4, 6).reshape(tiles * 64, 32 * words)


@triton.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x, packed, x_scale, scale, bias, out, parts, arrivals, M, N, K,
    GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows)."""
    tile, split, strip = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // 128, SPLITS)
    first = split * share
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    real = (m < M)[None, :]
    tiles = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * (32 * GROUP)
    tiles = packed + tiles + tl.arange(0, 32 * GROUP)[None, :]
    columns = x + m[None, :] * K + tl.arange(0, GROUP)[:, None]  # [GROUP, ROWS], x transposed
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for block in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        for i in tl.static_range(128 // GROUP):
            g = block * (128 // GROUP) + i
            w = tl.load(tiles + g * (N * (GROUP // 2)), eviction_policy="evict_first")
            s = tl.load(scale + g * N + n)
            xt = tl.load(columns + g * GROUP, mask=real, other=0)
            if ZERO:
                w = operand(w, s & 15, ZERO)
                s = (s & -16).to(tl.float32, bitcast=True)
            else:
                w = operand(w, 0, ZERO)
            exact = tl.dot(w, xt, out_dtype=tl.int32)
            acc += exact.to(tl.float32) * s.to(tl.float32)[:, None]
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = strip * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        sx = tl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0)
        if not ZERO:
            sx *= 0.0625
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
    rows, outputs, inputs = len(xq), weight.outputs, weight.inputs
    check_inputs(xq, (torch.int8,), inputs)
    check_input_scale(x_scale, rows)
    out = torch.empty((rows, outputs), dtype=out_dtype, device=xq.device)
    if rows == 0:
        return out
    tile = tile or gemm_tile("w4a8", xq.device, rows, outputs, inputs)
    w4a8_kernel[grid_of(tile, rows, outputs, workspace)](
        xq, weight.packed, x_scale, weight.scale, weight.bias, out, workspace.parts,
        workspace.arrivals, rows, outputs, inputs, GROUP=weight.group, ZERO=weight.zero_points,
        OUTPUTS=tile.outputs, ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages,
        PER_ROW=int(x_scale.numel() > 1), BIAS=weight.bias is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(),
    )  # fmt: skip
    return out
