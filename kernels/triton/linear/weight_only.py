"""Linear layers of 4- or 8-bit weights and fp16 or bf16 activations: W4A16 and W8A16.

    y[m, n] = sum_g s[g, n] sum_{k in g} x[m, k] (q[n, k] - z[g, n]) + b[n]

The weight is the left operand of the product, so that it goes from memory to the tensor cores
through registers alone (`kernels.triton.linear.operands`): the transposed tile acc[n, m] is summed.
Tiles are stored [K / 128, N / 64, words]: at one step all programs read one contiguous stretch.

One scale an output multiplies the whole sum. A group's scale multiplies its fp32 sum, or the
weights, rounded to the type of x, where that is less work: 4 bits and many rows. Such scales cost
half a unit of the last place a weight; 8-bit weights keep it. Beyond `LIBRARY_ROWS` the weight is
dequantized to a passing copy, and cuBLAS does the rest.

W4A16 has 4-bit weights in groups of inputs, W8A16 int8 weights with one scale an output channel or
group, whose integers are exact in either type, zero points taken. On sm_90 more than some tens of
rows of W4A16 go to `kernels.triton.linear.hopper.w4`, where it takes the weight.
"""

# pyright: reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingImports=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import wait_and_announce
from kernels.triton.experts import SortedRows
from kernels.triton.linear.hopper.launch import Levels, launch_w4, many_rows_tile, takes
from kernels.triton.linear.launch import (
    Product,
    by_warps,
    fitting,
    launch_few_rows,
    rows_of_tile,
    store_tile,
    sum_tile,
)
from kernels.triton.linear.operands import as_warps_read, beside, pack_tiles, quarters
from kernels.triton.linear.packing import BLOCK, check_grouped, gather_rows, lay_bias, lay_scales
from kernels.triton.linear.weight import GroupedWeight, check_inputs
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
def product(w, s, x, real, left, SHORT: tl.constexpr, WARP: tl.constexpr):
    """A group's product, in fp32, times its scales; see `inside`."""
    xt = tl.load(x, mask=inside(real, left, w.shape[1], SHORT), other=0.0)
    return tl.dot(w, as_warps_read(xt) if WARP else xt) * s.to(tl.float32)[:, None]


@triton.jit
def inside(real, left, COUNT: tl.constexpr, SHORT: tl.constexpr):
    """Which of the next COUNT inputs of rows are read: if SHORT, the first `left` of them."""
    return real & (tl.arange(0, COUNT)[:, None] < left) if SHORT else real


@triton.jit
def add_groups(
    acc, q0, q1, q2, q3, s0, s1, s2, s3, xs, real, left, GROUP: tl.constexpr,
    SCALE_WEIGHT: tl.constexpr, SHORT: tl.constexpr, WARP: tl.constexpr,
):  # fmt: skip
    """acc and the products of 128 inputs in groups of 32 or 64, each sum times its scales."""
    if GROUP == 32:
        acc += product(q0, s0, xs, real, left, SHORT, WARP)
        acc += product(q1, s1, xs + 32, real, left - 32, SHORT, WARP)
        acc += product(q2, s2, xs + 64, real, left - 64, SHORT, WARP)
        acc += product(q3, s3, xs + 96, real, left - 96, SHORT, WARP)
    else:
        acc += product(beside(q0, q1), s0, xs, real, left, SHORT, WARP)
        acc += product(beside(q2, q3), s2, xs + 64, real, left - 64, SHORT, WARP)
    return acc


@triton.jit
def add_whole(
    acc, q0, q1, q2, q3, s0, s1, s2, s3, xs, real, left, GROUP: tl.constexpr,
    SCALE_WEIGHT: tl.constexpr, SHORT: tl.constexpr, WARP: tl.constexpr,
):  # fmt: skip
    """acc and the product of 128 inputs: of one scale an output none is applied here."""
    xt = tl.load(xs, mask=inside(real, left, 128, SHORT), other=0.0)
    xt = as_warps_read(xt) if WARP else xt
    if GROUP == 0:
        acc = tl.dot(beside(beside(q0, q1), beside(q2, q3)), xt, acc)
    elif SCALE_WEIGHT:
        acc = tl.dot(scaled(q0, q1, q2, q3, s0, s1, s2, s3, GROUP), xt, acc)
    else:
        w = beside(beside(q0, q1), beside(q2, q3))
        acc += tl.dot(w, xt) * s0.to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["M"])
def weight_only_kernel(
    x, packed, scale, width, bias, out, parts, arrivals, experts, pairs, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr, SCALE_WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr, SHORT: tl.constexpr, WARP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); `GROUP` is 0 for one scale an output.

    With `experts` a tile of rows is one of an expert, and weights lie one after the other. If
    SHORT, rows of x have `width` < K inputs, and zeros stand for the others; see `by_warps`.
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
    columns = x + row[None, :] * width + tl.arange(0, STEP)[:, None]  # x transposed
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if GROUP == 0:
        s0, s1, s2, s3, z0, z1, z2, z3 = scales_of(scale + n, N, GROUP, BITS, ZERO)
    for g in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        w = tl.load(words + g * (N * (WORDS // 64)), eviction_policy="evict_first")
        if GROUP > 0:
            place = scale + g * (N * (128 // GROUP)) + n
            s0, s1, s2, s3, z0, z1, z2, z3 = scales_of(place, N, GROUP, BITS, ZERO)
        q0, q1, q2, q3 = quarters(w, z0, z1, z2, z3, BITS, ZERO, DT, WARP)
        add: tl.constexpr = add_whole if STEP == 128 else add_groups
        acc = add(
            acc, q0, q1, q2, q3, s0, s1, s2, s3, columns + g * 128, real, width - g * 128, GROUP,
            SCALE_WEIGHT, SHORT, WARP,
        )  # fmt: skip
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        if GROUP == 0:
            acc *= s0.to(tl.float32)[:, None]
        if BIAS:
            acc += tl.load(bias + n)[:, None]
        store_tile(acc, out, m, n, N, real)


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


@dataclass(frozen=True)
class FloatInputWeight(GroupedWeight):
    """A weight of 4 or 8 bits that float rows are multiplied by.

    `packed` is int32 [K / 128, N / 64, 256 BITS] (`kernels.triton.linear.operands`).
    """

    BITS: ClassVar[int]
    SHORT_ROWS: ClassVar[bool] = True

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernel."""
        return f"w{self.BITS}a16"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in fp16 or bf16; of 4 bits, scale and product are rounded to it.

        Of 8 bits the product is one of fp32, and rounded once.
        """
        outputs, inputs = self.size
        out = torch.empty((outputs, inputs), dtype=dtype, device=self.packed.device)
        dequantize_kernel[(outputs // 64, inputs // BLOCK)](
            self.packed, self.scale, out, outputs, inputs, BITS=self.BITS, GROUP=self.group,
            ZERO=self.zero_points, enable_fp_fusion=True,
        )  # fmt: skip
        return out

    @property
    def gathers(self) -> bool:
        """Whether `rows` gives rows of it."""
        return True

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T]."""
        return gather_rows(
            ids, self.packed.view(torch.uint8), self.scale, self.size, dtype, "tiles",
            bits=self.BITS, group=self.group, zero_points=self.zero_points,
        )  # fmt: skip

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are floats of K inputs."""
        check_inputs(x, FLOATS, self.size[1], short=True)

    def plain_tile(
        self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None
    ) -> Tile | None:
        """How a product is cut; None for cuBLAS, on a passing copy of the weight."""
        if sorted_rows is None and len(x) > LIBRARY_ROWS:
            return None
        return self.few_rows_tile(x, sorted_rows)

    @property
    def tallest_invariant_tile(self) -> int:
        """Up to which sums of groups, not weights, are scaled."""
        return 64 * self.group // BLOCK if self.group and self.BITS == 4 else 64

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says, with stages that fit."""
        tile = super().few_rows_tile(x, sorted_rows)
        return fitting(tile, 16 * self.BITS, 256, self.group, shared_memory(x.device))

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel."""
        x = product.x
        sums = tile.rows * (BLOCK // self.group if self.group else 0)
        launch_few_rows(
            weight_only_kernel, (x, self.packed, self.scale, x.shape[1]), self.bias, product, tile,
            inputs=self.size[1], SHORT=x.shape[1] < self.size[1], BITS=self.BITS,
            GROUP=self.group, ZERO=self.zero_points, SCALE_WEIGHT=self.BITS == 4 and sums > 64,
            WARP=by_warps(tile),
        )  # fmt: skip

    def by_library(self, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same by cuBLAS."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantize(x.dtype)[:, : x.shape[1]], bias).to(dtype)


def pack_float_input(
    kind: type[FloatInputWeight],
    q: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    zero_point: Tensor | None,
) -> Any:
    """Lay a weight out; see `pack_w4a16`."""
    bits = kind.BITS
    check_grouped(q, scale, zero_point, bits)
    laid, group, zeros = lay_scales(scale, zero_point, q.shape[-1], bits, keep_whole=bits == 8)
    return kind(pack_tiles(q, bits), laid, lay_bias(bias, q), group, zeros)


class W4A16Weight(FloatInputWeight):
    """A 4-bit weight for float rows; `packed` is int32 [K / 128, N / 64, 1024]."""

    BITS: ClassVar[int] = 4

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 128

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut; None for cuBLAS, on a passing copy of the weight."""
        found = None
        if sorted_rows is None and takes(self, Levels(self.scale), dtype):
            found = many_rows_tile(self.family, x.device, len(x), *self.size)
        return found or self.plain_tile(x, dtype, sorted_rows)

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows."""
        launch_w4(self, Levels(self.scale), product, tile)


def pack_w4a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W4A16Weight:
    """Lay a quantized weight out, on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, groups], groups of 32, 64 or a multiple of 128 inputs. Without zero points
            its type is kept. fp32 is faster: of tiles of fewer than 256 outputs 16-bit scales are
            too small for asynchronous loads, and are waited for.
        bias: Float [N] or None.
        zero_point: int8 [N, groups] in [-8, 7], or None for zeros.

    Raises:
        ValueError: a shape, type or value is another.
    """
    return pack_float_input(W4A16Weight, q, scale, bias, zero_point)


class W8A16Weight(FloatInputWeight):
    """An int8 weight for float rows; `packed` is int32 [K / 128, N / 64, 2048]."""

    BITS: ClassVar[int] = 8


def pack_w8a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W8A16Weight:
    """Lay a quantized weight out, on the device it is on.

    Args:
        q: int8 [N, K]; N a multiple of 64, K of 128.
        scale: Float [N, 1], or [N, groups], groups of 32, 64 or a multiple of 128 inputs.
        bias: Float [N] or None.
        zero_point: int8 [N, groups], or None for zeros.

    Raises:
        ValueError: a shape or type is another.
    """
    return pack_float_input(W8A16Weight, q, scale, bias, zero_point)
