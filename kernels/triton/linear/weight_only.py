"""Linear layers of 4- or 8-bit weights and fp16 or bf16 activations: W4A16 and W8A16.

    y[m, n] = sum_g s[g, n] sum_{k in g} x[m, k] (q[n, k] - z[g, n]) + b[n]

The weight is the left operand of the product, so that it goes from memory to the tensor cores
through registers alone (`kernels.triton.linear.operands`): the transposed tile acc[n, m] is summed.
Tiles are stored [K / 128, N / 64, words]: at one step all programs read one contiguous stretch.

One scale an output multiplies the whole sum. A group's scale multiplies its fp32 sum, or the
weights, rounded to the type of x, where that is less work: 4 bits and many rows. Such scales cost
half a unit of the last place a weight; 8-bit weights keep it. Beyond `LIBRARY_ROWS` the weight is
dequantized to a passing copy, and cuBLAS does the rest.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Workspace, announce, overlap, sum_splits, wait
from kernels.triton.experts.sorting import SortedRows, rows_of, rows_of_tile, tile_of
from kernels.triton.linear.operands import beside, quarters
from kernels.triton.linear.packed import BLOCK, GroupedWeight, check_inputs, fitting, grid_of
from kernels.triton.tuning import Tile, shared_memory

LIBRARY_ROWS = 512
FLOATS = (torch.float16, torch.bfloat16)


@triton.jit
def scales_of(place, N, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Scales and zero points of the four quarters of 128 inputs, of [groups, N] from `place` on."""
    a = tl.load(place)
    b, c, d = a, a, a
    if GROUP == 64:
        c = tl.load(place + N)
        d = c
    if GROUP == 32:
        b, c, d = tl.load(place + N), tl.load(place + 2 * N), tl.load(place + 3 * N)
    low: tl.constexpr = (1 << BITS) - 1
    s0, s1, s2, s3, z0, z1, z2, z3 = a, b, c, d, a, b, c, d
    if ZERO:
        z0, z1, z2, z3 = a & low, b & low, c & low, d & low
        s0, s1 = (a - z0).to(tl.float32, bitcast=True), (b - z1).to(tl.float32, bitcast=True)
        s2, s3 = (c - z2).to(tl.float32, bitcast=True), (d - z3).to(tl.float32, bitcast=True)
    return s0, s1, s2, s3, z0, z1, z2, z3


@triton.jit
def scaled(q0, q1, q2, q3, s0, s1, s2, s3, GROUP: tl.constexpr):
    """Four quarters of a tile times scales [outputs], in their type: [outputs, 128]."""
    if GROUP > 0 and GROUP < 128:
        q0, q1 = q0 * s0.to(q0.dtype)[:, None], q1 * s1.to(q0.dtype)[:, None]
        q2, q3 = q2 * s2.to(q0.dtype)[:, None], q3 * s3.to(q0.dtype)[:, None]
    w = beside(beside(q0, q1), beside(q2, q3))
    if GROUP == 0 or GROUP == 128:
        w *= s0.to(w.dtype)[:, None]
    return w


@triton.jit
def product(w, s, x, real):
    """A group's product, in fp32, times its scales."""
    return tl.dot(w, tl.load(x, mask=real, other=0.0)) * s.to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["M"])
def weight_only_kernel(
    x, packed, scale, bias, out, parts, arrivals, experts, pairs, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr, SCALE_WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); `GROUP` is 0 for one scale an output.

    With `experts` a tile of rows is one of an expert, and weights lie one behind the other.
    """
    DT: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = 256 * BITS
    STEP: tl.constexpr = GROUP if GROUP > 0 and not SCALE_WEIGHT else 128
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // 128, SPLITS)
    first = split * share
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, m, row, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (K // 128 * (N // 64) * WORDS)
        scale += expert * (N * (K // GROUP if GROUP > 0 else 1))
        if BIAS:
            bias += expert * N
    real = there[None, :]
    words = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * WORDS
    words = packed + words + tl.arange(0, WORDS)[None, :]
    columns = x + row[None, :] * K + tl.arange(0, STEP)[:, None]  # x transposed
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if GROUP == 0:
        s0, s1, s2, s3, z0, z1, z2, z3 = scales_of(scale + n, N, GROUP, BITS, ZERO)
    for g in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        w = tl.load(words + g * (N * (WORDS // 64)), eviction_policy="evict_first")
        if GROUP > 0:
            place = scale + g * (N * (128 // GROUP)) + n
            s0, s1, s2, s3, z0, z1, z2, z3 = scales_of(place, N, GROUP, BITS, ZERO)
        xs = columns + g * 128
        if STEP == 128:
            xt = tl.load(xs, mask=real, other=0.0)
        q0, q1, q2, q3 = quarters(w, z0, z1, z2, z3, BITS, ZERO, DT)
        if STEP == 32:
            acc += product(q0, s0, xs, real)
            acc += product(q1, s1, xs + 32, real)
            acc += product(q2, s2, xs + 64, real)
            acc += product(q3, s3, xs + 96, real)
        elif STEP == 64:
            acc += product(beside(q0, q1), s0, xs, real)
            acc += product(beside(q2, q3), s2, xs + 64, real)
        elif GROUP == 0:
            acc = tl.dot(beside(beside(q0, q1), beside(q2, q3)), xt, acc)
        elif SCALE_WEIGHT:
            acc = tl.dot(scaled(q0, q1, q2, q3, s0, s1, s2, s3, GROUP), xt, acc)
        else:
            w = beside(beside(q0, q1), beside(q2, q3))
            acc += tl.dot(w, xt) * s0.to(tl.float32)[:, None]
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = row_tile * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        if GROUP == 0:
            acc *= s0.to(tl.float32)[:, None]
        if BIAS:
            acc += tl.load(bias + n)[:, None]
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def dequantize_kernel(
    packed, scale, out, N, K, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr
):  # fmt: skip
    """Program (tile of 64 outputs, 128 inputs)."""
    DT: tl.constexpr = out.dtype.element_ty
    WORDS: tl.constexpr = 256 * BITS
    tile, block = tl.program_id(0), tl.program_id(1)
    words = packed + (block * (N // 64) + tile) * WORDS + tl.arange(0, WORDS)[None, :]
    n = tile * 64 + tl.arange(0, 64)
    place = scale + n
    if GROUP > 0:
        place += block * (N * (128 // GROUP))
    w = tl.load(words, eviction_policy="evict_first")
    s0, s1, s2, s3, z0, z1, z2, z3 = scales_of(place, N, GROUP, BITS, ZERO)
    q0, q1, q2, q3 = quarters(w, z0, z1, z2, z3, BITS, ZERO, DT)
    if BITS == 8:  # scales of 8-bit weights may be too small for fp16
        q0, q1, q2, q3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    w = scaled(q0, q1, q2, q3, s0, s1, s2, s3, GROUP)
    k = block * 128 + tl.arange(0, 128)
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], w.to(DT))


def dequantize(weight: GroupedWeight, bits: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16 or bf16; of 4 bits, scale and product are rounded to it."""
    outputs, inputs = weight.outputs, weight.inputs
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.packed.device)
    dequantize_kernel[(outputs // 64, inputs // BLOCK)](
        weight.packed, weight.scale, out, outputs, inputs,
        BITS=bits, GROUP=weight.group, ZERO=weight.zero_points, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def weight_only_linear(
    x: Tensor,
    weight: GroupedWeight,
    bits: int,
    workspace: Workspace,
    tile: Tile | None,
    out_dtype: torch.dtype | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """x W^T + bias, of weights of 4 or 8 bits; see `kernels.triton.linear.w4a16.w4a16_linear`."""
    (rows, places), outputs, inputs = rows_of(x, sorted_rows), weight.outputs, weight.inputs
    check_inputs(x, FLOATS, inputs)
    if tile is None and sorted_rows is None and rows > LIBRARY_ROWS:
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        return F.linear(x, dequantize(weight, bits, x.dtype), bias).to(out_dtype or x.dtype)
    out = torch.empty((rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    if tile is None:
        tile = tile_of(f"w{bits}a16", x, outputs, inputs, sorted_rows)
        tile = fitting(tile, 16 * bits, 256, weight.group, shared_memory(x.device))
    sums = tile.rows * (BLOCK // weight.group if weight.group else 0)
    weight_only_kernel[grid_of(tile, rows, outputs, workspace, sorted_rows)](
        x, weight.packed, weight.scale, weight.bias, out, workspace.parts, workspace.arrivals,
        M=rows, N=outputs, K=inputs, **places, BITS=bits, GROUP=weight.group,
        ZERO=weight.zero_points, OUTPUTS=tile.outputs, ROWS=tile.rows, SPLITS=tile.splits,
        STAGES=tile.stages, SCALE_WEIGHT=bits == 4 and sums > 64, BIAS=weight.bias is not None,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, **overlap(),
    )  # fmt: skip
    return out
