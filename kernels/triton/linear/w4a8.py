"""W4A8: 4-bit weights in groups of inputs, int8 activations with a scale a row or tensor.

    y[m, n] = sx[m] sum_g s[g, n] (sum_{k in g} xq[m, k] (q[n, k] - z[g, n])) + b[n]

As in `kernels.triton.linear.weight_only` the weight is the left operand and goes through registers
alone, but to the int8 tensor cores: a byte holds input k as the low and k + 16 as the high half,
and a shift and two masks turn four bytes into eight int8 of value 16 q, sign included. A group's
sum is exact in int32; the sixteenth is taken in the epilogue. With zero points the halves hold q +
8, and become eight int8 of value q - z: 128 is set beside each before 8 + z is taken, so that bytes
do not borrow, and cleared after. This is less work than the sums of x that z could be multiplied
by.

A packed tile is 64 outputs by the inputs of a group: byte b of word j of quad i holds input
32 j + 4 i + b. Of groups of 32 and 64 a step of the loop takes four and two.

Scales of two levels (`kernels.two_level`), s[g, n] = unit[n] m[g, n], need no scaling of groups:

    y[m, n] = (sum_k xq[m, k] (q[n, k] m[g, n])) (sx[m] unit[n]) + b[n]

is a sum of int8 products, exact in int32 over all inputs however it is cut, and equals
`kernels.reference.int8_linear` of the weight q m bit for bit. The halves hold u = q + 8, and bytes
become u m + (128 - 8 m), from 0 to 240, by one multiply-add of four, which lacks but the sign: 128
less. Tiles are of 128 inputs whatever the group. The multipliers of four outputs share a word, the
least that can be loaded asynchronously: int32 [K / 128, N / 64, a, c / 2, 128 / group], where byte
2 b + c % 2 is that of output 16 a + 8 b + c of 64, as a thread has them. One scale for a whole row
is unit alone: 16 q are summed, and 4 bits shifted out.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
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
from kernels.triton.linear.operands import (
    as_warps_read,
    multiplied_operand,
    multipliers_of,
    operand,
    operand_and_scale,
)
from kernels.triton.linear.packing import BLOCK, check_grouped, lay_bias, lay_scales
from kernels.triton.linear.weight import GroupedWeight, check_input_scale, check_inputs
from kernels.triton.tuning import Tile, shared_memory
from kernels.two_level import two_level

LONGEST = 1 << 16  # inputs whose products an int32 holds


@triton.jit
def of_expert(
    expert, packed, scale, N, K,
    GROUP: tl.constexpr, EXACT: tl.constexpr, MULTIPLIERS: tl.constexpr,
):  # fmt: skip
    """Where the weight of an expert starts, and the scales of its groups."""
    packed += expert.to(tl.int64) * (K // 2 * N)
    if MULTIPLIERS:
        scale += expert * (K // 128 * (N // 4) * MULTIPLIERS)
    elif not EXACT:
        scale += expert * (K // GROUP * N)
    return packed, scale


@triton.jit
def with_group(
    acc, tiles, columns, scale, n, real, g, N,
    GROUP: tl.constexpr, ZERO: tl.constexpr, EXACT: tl.constexpr, MULTIPLIERS: tl.constexpr,
    WARP: tl.constexpr,
):  # fmt: skip
    """acc and the product of the g-th group of inputs.

    `tiles` and `columns` point to weights and inputs of the first group, `scale` to a table
    [groups, N], or with MULTIPLIERS to the words of the first group's.
    """
    w = tl.load(tiles + g * (N * (GROUP // 2)), eviction_policy="evict_first")
    if MULTIPLIERS:
        s = multipliers_of(scale, g, N, MULTIPLIERS)
    elif not EXACT:
        s = tl.load(scale + g * N + n)
    xt = tl.load(columns + g * GROUP, mask=real, other=0)
    xt = as_warps_read(xt) if WARP else xt
    if MULTIPLIERS:
        w = multiplied_operand(w, s, WARP)
    elif EXACT:
        w = operand(w, 0, ZERO, WARP)
    else:
        w, s = operand_and_scale(w, s, ZERO, WARP)
    if EXACT:
        acc = tl.dot(w, xt, acc, out_dtype=tl.int32)
    else:
        exact = tl.dot(w, xt, out_dtype=tl.int32)
        acc += exact.to(tl.float32) * s.to(tl.float32)[:, None]
    return acc


@triton.jit
def scaled_sum(
    acc, x_scale, unit, bias, row, there, n,
    ZERO: tl.constexpr, EXACT: tl.constexpr, MULTIPLIERS: tl.constexpr, PER_ROW: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """A sum times the scales of rows (and of outputs, if EXACT), and the bias."""
    sx = tl.load(x_scale + row * PER_ROW, mask=there, other=0.0)
    if EXACT:
        if MULTIPLIERS == 0:
            acc >>= 4
        y = acc.to(tl.float32) * (sx[None, :] * tl.load(unit + n)[:, None])
    else:
        if not ZERO:
            sx *= 0.0625
        y = acc * sx[None, :]
    if BIAS:
        y += tl.load(bias + n)[:, None]
    return y


@triton.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x, packed, x_scale, scale, unit, bias, out, parts, arrivals, experts, pairs, M, N, K,
    GROUP: tl.constexpr, ZERO: tl.constexpr, EXACT: tl.constexpr, MULTIPLIERS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr, PER_ROW: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr, WARP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); EXACT is of two levels."""
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
        packed, scale = of_expert(expert, packed, scale, N, K, GROUP, EXACT, MULTIPLIERS)
        if EXACT:
            unit += expert * N
        if BIAS:
            bias += expert * N
    real = there[None, :]
    tiles = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * (32 * GROUP)
    tiles = packed + tiles + tl.arange(0, 32 * GROUP)[None, :]
    columns = x + row[None, :] * K + tl.arange(0, GROUP)[:, None]  # [GROUP, ROWS], x transposed
    if MULTIPLIERS:
        scale += (tile * (OUTPUTS // 4) + tl.arange(0, OUTPUTS // 4)) * MULTIPLIERS
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.int32 if EXACT else tl.float32)
    for block in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        for i in tl.static_range(128 // GROUP):
            g = block * (128 // GROUP) + i
            acc = with_group(
                acc, tiles, columns, scale, n, real, g, N, GROUP, ZERO, EXACT, MULTIPLIERS, WARP
            )
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        if out.dtype.element_ty == tl.int32:
            y = acc if MULTIPLIERS else acc >> 4
        else:
            y = scaled_sum(
                acc, x_scale, unit, bias, row, there, n, ZERO, EXACT, MULTIPLIERS, PER_ROW, BIAS
            )
        store_tile(y, out, m, n, N, real)


@dataclass(frozen=True)
class W4A8Weight(GroupedWeight):
    """A 4-bit weight for int8 rows, two a byte.

    `packed` is int8 [K / 128, 128 / group, N / 64, 32 group], of two levels [K / 128, 1, N / 64,
    4096]; `scale` then int32 [K / 128, N / 4 * 128 / group], and of whole rows (`group` 0) empty.

    Attributes:
        unit: Of scales of two levels, fp32 [N]; None for others.
    """

    unit: Tensor | None = None

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernels."""
        return "w4a8" if self.unit is None else "w4a8_two_level"

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        outputs, inputs = super().size
        return (outputs if self.unit is None else len(self.unit)), inputs

    @property
    def levels(self) -> Levels:
        """Scales as the kernel for many rows takes them."""
        if self.unit is None:
            return Levels(self.scale)
        loaded = self.scale if self.group else self.unit
        return Levels(loaded.view(torch.int8), self.multipliers, self.unit)

    @property
    def multipliers(self) -> int:
        """Of two levels: groups in 128 inputs; 0 of whole rows, and of one level."""
        return BLOCK // self.group if self.group and self.unit is not None else 0

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are int8 of K inputs and have their scales."""
        check_inputs(x, (torch.int8,), self.size[1])
        check_input_scale(x_scale, len(x))

    @property
    def exact(self) -> bool:
        """Whether scales are of two levels."""
        return self.unit is not None

    @property
    def output_scale(self) -> Tensor:
        """fp32 [N], of two levels alone."""
        return super().output_scale if self.unit is None else self.unit

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile:
        """How a product is cut."""
        found = None
        if sorted_rows is None and takes(self, self.levels, dtype):
            found = many_rows_tile(self.family, x.device, len(x), *self.size)
        return found or self.few_rows_tile(x, sorted_rows)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says, with stages that fit."""
        tile = super().few_rows_tile(x, sorted_rows)
        spread = 128 * tile.outputs if self.zero_points else 0  # to the places of weights
        return fitting(tile, 64, 128, self.group, shared_memory(x.device) - spread)

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel for few rows.

        Sums of groups are exact; sums over groups are of fp32, but of two levels, where all is
        exact up to the scales. There a fused multiply-add would round once, the twin rounds twice.
        """
        exact = self.unit is not None
        operands = (product.x, self.packed, product.x_scale, self.scale, self.unit)
        launch_few_rows(
            w4a8_kernel, operands, self.bias, product, tile, exact=exact, fused=not exact,
            GROUP=BLOCK if exact else self.group, ZERO=self.zero_points, EXACT=exact,
            MULTIPLIERS=self.multipliers, PER_ROW=product.per_row, WARP=by_warps(tile),
        )  # fmt: skip

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows: the same bits but for the order of groups in a sum."""
        launch_w4(self, self.levels, product, tile)


def pack_w4a8(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W4A8Weight:
    """Lay a quantized weight out on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, groups], as `kernels.triton.linear.weight_only.pack_w4a16` takes them.
        bias: Float [N] or None.
        zero_point: int8 [N, groups] in [-8, 7], or None for zeros.

    Returns:
        The weight; of two levels where the scales are, and there are no zero points.

    Raises:
        ValueError: a shape, type or value is another.
    """
    check_grouped(q, scale, zero_point, 4)
    inputs, bias, levels = q.shape[-1], lay_bias(bias, q), None
    if zero_point is None and inputs <= LONGEST:
        levels = two_level(scale.detach().flatten(0, -2))
    if levels is not None:
        unit, m = levels
        return _pack_two_level(q, unit.view(q.shape[:-1]), m.view(scale.shape), bias)
    scales, group, zeros = lay_scales(scale, zero_point, inputs, 4)
    packed = _lay(q + 8 if zeros else q & 15, group)
    return W4A8Weight(packed, scales, bias, group, zeros)


def _lay(nibbles: Tensor, group: int) -> Tensor:
    """Nibbles, one a byte [N, K], in the order of `W4A8Weight.packed`."""
    *experts, outputs, inputs = nibbles.shape
    nibbles = nibbles.view(torch.uint8)
    parts = nibbles.reshape(-1, outputs // 64, 4, 2, 8, inputs // group, group // 32, 2, 4, 4)
    low, high = parts.unbind(7)  # [expert, tile, a, b, c, g, j, quad, byte], n = 16 a + 8 b + c
    packed = (low | (high << 4)).permute(0, 5, 1, 3, 2, 4, 7, 6, 8)
    packed = packed.reshape(*experts, inputs // BLOCK, BLOCK // group, outputs // 64, 32 * group)
    return packed.view(torch.int8)


def _pack_two_level(q: Tensor, unit: Tensor, m: Tensor, bias: Tensor | None) -> W4A8Weight:
    """Of a unit [N] and multipliers int8 [N, groups] from 1 to 16; see the top of the file."""
    *experts, outputs, inputs = q.shape
    if bool((m == 1).all()):
        none = torch.empty((*experts, 0, 0), dtype=torch.int32, device=q.device)
        return W4A8Weight(_lay(q & 15, BLOCK), none, bias, 0, False, unit)
    group, blocks = inputs // m.shape[-1], inputs // BLOCK
    m = m.repeat_interleave(max(1, group // BLOCK), dim=-1)
    parts = m.reshape(-1, outputs // 64, 4, 2, 4, 2, blocks, m.shape[-1] // blocks)
    words = parts.permute(0, 6, 1, 2, 4, 7, 3, 5)  # expert, tile, a, b, c / 2, c % 2, block, group
    words = words.reshape(*experts, blocks, -1)
    return W4A8Weight(
        _lay(q + 8, BLOCK), words.view(torch.int32), bias, min(group, BLOCK), False, unit
    )
