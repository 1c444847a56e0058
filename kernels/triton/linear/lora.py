"""LoRA adapters of a linear layer, several in one batch (Hu et al. 2021, arXiv 2106.09685).

    y[t] += B[s] u[t],    u[t] = A[s] x[t],    s = slots[t]; rows of slot -1 stay as they are

Two launches, as of Punica (Chen et al. 2023, arXiv 2310.18547). `shrink` leaves partial sums of u,
one for each split of the inputs: a program of its own writes each, so that nothing is added in any
order but one. `expand` adds them up and multiplies by B. A program of either takes a tile of rows
and the slots that these name, one after the other, each `ways`-th of them: a tile of one slot costs
one product, and slots that no row names cost nothing. A row's sums depend on no other row.

The base layer's kernel runs just ahead, and y alone is its own: where all else is `ready` before it
starts, on Hopper `shrink` multiplies while it runs, and `expand` asks for its part of B.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    EARLY_ROWS,
    announce,
    capability,
    overlap,
    prefetch_lines,
    require,
    wait,
)
from kernels.triton.linear.packing import BLOCK

RANKS = (16, 32, 64, 128)  # as padded
MOST_PARTS = 3
FEW_ROWS, PROGRAMS = 64, 264  # of more rows tiles are higher; of few programs inputs are split
CHUNK = 32  # ranks whose sums registers hold at once
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class LoraTile:
    """How the two products are cut.

    Attributes:
        rows: Of a tile, 16 or more.
        inputs: Of a step of the sum over K.
        splits: Programs that share the inputs of a tile.
        outputs: Of a tile of the result.
        ways: Programs that share the slots of a tile; of no effect on any bit.
    """

    rows: int
    inputs: int
    splits: int
    outputs: int
    ways: int


@dataclass(frozen=True)
class LoraStack:
    """The adapters of one linear layer, which may be several merged; a slot for each.

    They stay where they are in memory, as CUDA graphs hold their addresses. Zeros fill what an
    adapter of a smaller rank, or one that leaves a part as it is, does not use.

    Attributes:
        a: [S, P, R, K], P parts such as q, k and v, in the model's float type.
        b: [S, N, R], the parts' outputs one after the other.
        starts: The first output of each part.
    """

    a: Tensor
    b: Tensor
    starts: tuple[int, ...]

    @classmethod
    def empty(
        cls, slots: int, parts_outputs: Sequence[int], rank: int, inputs: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> LoraStack:  # fmt: skip
        """Slots of zeros.

        Args:
            slots: How many adapters are held at once.
            parts_outputs: Outputs of each part, 1 to 3 parts.
            rank: The largest of any adapter, up to 128.
            inputs: K, without what fills up the rows of a quantized weight.
            dtype: The model's float type.

        Raises:
            ValueError: a number is out of its range, or the type no float.
        """
        parts = len(parts_outputs)
        require(0 < parts <= MOST_PARTS, f"{parts} parts; a layer has 1 to {MOST_PARTS}")
        require(0 < rank <= RANKS[-1], f"rank is {rank}; supported are 1 to {RANKS[-1]}")
        require(dtype in FLOATS, f"adapters are asked for in {dtype}; supported are {FLOATS}")
        positive = min(slots, inputs, *parts_outputs) > 0
        require(positive, f"{slots} slots, {inputs} inputs, outputs {parts_outputs}: none may be 0")
        padded = next(size for size in RANKS if size >= rank)
        starts = tuple(sum(parts_outputs[:i]) for i in range(parts))
        a = torch.zeros((slots, parts, padded, inputs), dtype=dtype, device=device)
        b = torch.zeros((slots, sum(parts_outputs), padded), dtype=dtype, device=device)
        return cls(a, b, starts)

    def put(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Lay one part of an adapter into a slot; zeros fill the ranks that it lacks.

        Args:
            a: [r, K].
            b: [n, r], multiplied by the adapter's scale.

        Raises:
            ValueError: there is no such place, or a shape does not fit.
        """
        self._check(slot)
        require(0 <= part < len(self.starts), f"part {part} of {len(self.starts)}")
        outputs = self.outputs_of(part)
        (ranks, inputs), rank = self.a.shape[2:], len(a)
        fits = rank <= ranks and a.shape == (rank, inputs) and b.shape == (len(outputs), rank)
        require(
            fits,
            f"A is {tuple(a.shape)} and B {tuple(b.shape)}; needed are (r, {inputs}) and "
            f"({len(outputs)}, r), r up to {ranks}",
        )
        own_a, own_b = self.a[slot, part], self.b[slot, outputs.start : outputs.stop]
        own_a[:rank].copy_(a)
        own_a[rank:].zero_()
        own_b[:, :rank].copy_(b)
        own_b[:, rank:].zero_()

    def clear(self, slot: int) -> None:
        """Make an adapter one that adds zero; ValueError where there is no such slot."""
        self._check(slot)
        self.a[slot].zero_()
        self.b[slot].zero_()

    def outputs_of(self, part: int) -> range:
        """The outputs of a part."""
        stops = (*self.starts[1:], self.b.shape[1])
        return range(self.starts[part], stops[part])

    def _check(self, slot: int) -> None:
        require(0 <= slot < len(self.a), f"slot {slot}; there are 0 to {len(self.a) - 1}")

    def tile(self, rows: int, invariant: bool = False) -> LoraTile:
        """How a product of so many rows is cut, by rule.

        Args:
            rows: T.
            invariant: Whether a row's bits are to be the same for any number of rows.
        """
        slots, parts, rank, inputs = self.a.shape
        few = invariant or rows <= FEW_ROWS
        height = 16 if few else 64
        step = min(256 if few else 128, 8192 // rank) * 2 // self.a.element_size()
        steps = triton.cdiv(inputs, step)
        if few:
            wanted = min(triton.cdiv(inputs, 512), 16 if rank < 64 else 8)
        else:
            wanted = min(4, PROGRAMS // (triton.cdiv(rows, height) * parts))
        share = triton.cdiv(steps, max(1, min(wanted, steps)))
        wide = few and rank <= 32 and self.b.shape[1] >= 16384
        ways = max(1, min(slots, rows, 8, 1024 // max(rows, 1)))
        return LoraTile(height, step, triton.cdiv(steps, share), 256 if wide else 128, ways)


@triton.jit
def least_above(own, slot, S):
    """The least of a tile's slots above `slot`; S or more where there is none."""
    return tl.min(tl.where(own > slot, own, S), 0)


@triton.jit
def rows_and_slots(tile, slots, way, T, S, ROWS: tl.constexpr):
    """(rows of a tile, their slots, -1 beyond T, the first slot that is this way's)."""
    m = tile * ROWS + tl.arange(0, ROWS)
    own = tl.load(slots + m, mask=m < T, other=-1)
    slot = least_above(own, -1, S)
    for _ in range(way):
        slot = least_above(own, slot, S)
    return m, own, slot


@triton.jit
def float_rows(
    columns, scales, m, mine, k, COLUMNS, pitch, run_pitch, DT: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Some columns k of rows as floats of type DT; scaled, and rounded, if runs have scales."""
    real = mine[:, None] & (k < COLUMNS)[None, :]
    x = tl.load(columns + k[None, :], mask=real, other=0.0)
    if GROUP:
        places = scales + m[:, None] * pitch + (k // GROUP)[None, :] * run_pitch
        x = x.to(tl.float32) * tl.load(places, mask=real, other=0.0)
    return x.to(DT)


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(
    x, scales, slots, a, u, T, S, K, COLUMNS, x_pitch, pitch, run_pitch,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, WAYS: tl.constexpr, GROUP: tl.constexpr, READY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, way, split and part): u [SPLITS, T, PARTS * RANK] of its rows.

    If READY, the kernel ahead writes none of what is read here. `expand` starts meanwhile; it waits
    for the end of this kernel, all of whose programs wait.
    """
    DT: tl.constexpr = a.dtype.element_ty
    tile, way, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, split = piece % PARTS, piece // PARTS
    if not READY:
        wait(OVERLAP)
    announce(OVERLAP)
    m, own, slot = rows_and_slots(tile, slots, way, T, S, ROWS)
    row, r, k = m.to(tl.int64), tl.arange(0, RANK), tl.arange(0, INPUTS)
    columns = x + row[:, None] * x_pitch
    steps = tl.cdiv(COLUMNS, INPUTS)
    share = tl.cdiv(tl.cdiv(K, INPUTS), SPLITS)
    while slot < S:
        mine = own == slot
        ranks = a + ((slot.to(tl.int64) * PARTS + part) * RANK + r[None, :]) * K
        acc = tl.zeros([ROWS, RANK], tl.float32)
        first, last = split * share, tl.minimum(split * share + share, steps)
        for i in tl.range(first, last, num_stages=3):
            at = i * INPUTS + k
            xs = float_rows(columns, scales, m, mine, at, COLUMNS, pitch, run_pitch, DT, GROUP)
            w = tl.load(ranks + at[:, None], mask=(at < COLUMNS)[:, None], other=0.0)
            acc = tl.dot(xs, w, acc, input_precision="ieee")
        if scales is not None and not GROUP:
            acc *= tl.load(scales + m * pitch, mask=mine, other=0.0)[:, None]
        wait(OVERLAP)
        place = u + (split * T + row)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
        tl.store(place, acc, mask=mine[:, None])
        for _ in range(WAYS):
            slot = least_above(own, slot, S)
    wait(OVERLAP)


@triton.jit
def outputs_of_tile(tile, second, third, N, OUTPUTS: tl.constexpr):
    """(the part of a tile of outputs, its outputs, the end of the part); parts begin with tiles."""
    first = tl.cdiv(second, OUTPUTS)
    two = first + tl.cdiv(third - second, OUTPUTS)
    part = (tile >= first).to(tl.int32) + (tile >= two).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, first, two))
    begin = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    end = tl.where(part == 0, second, tl.where(part == 1, third, N))
    return part, begin + (tile - before) * OUTPUTS + tl.arange(0, OUTPUTS), end


@triton.jit(do_not_specialize=["T"])
def expand_kernel(
    u, slots, b, y, T, S, N, second, third, y_pitch,
    PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr, WAYS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr,
    LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, tile of rows, way); the parts begin at 0, `second` and `third`."""
    m, own, slot = rows_and_slots(tl.program_id(1), slots, tl.program_id(2), T, S, ROWS)
    part, n, end = outputs_of_tile(tl.program_id(0), second, third, N, OUTPUTS)
    row, r = m.to(tl.int64), tl.arange(0, CHUNK)
    split = tl.arange(0, HELD)[:, None, None]  # at once, all on their way from memory
    sums = u + (split * T + row[None, :, None]) * (PARTS * RANK) + part * RANK + r[None, None, :]
    places = y + row[:, None] * y_pitch + n[None, :]
    real = (n < end)[:, None]
    if OVERLAP:  # noqa: SIM102  (known when compiled; the other is not)
        if slot < S:
            line = tl.minimum(n, end - 1)[:, None] * RANK + (tl.arange(0, LINES) * 64)[None, :]
            prefetch_lines(b + slot.to(tl.int64) * N * RANK + line)
    wait(OVERLAP)
    announce(OVERLAP)
    while slot < S:
        mine = (own == slot)[:, None]
        there = mine & (n < end)[None, :]
        summed = mine[None, :, :] & (split < SPLITS)
        ranks = b + slot.to(tl.int64) * N * RANK + n[:, None] * RANK + r[None, :]
        before = tl.load(places, mask=there, other=0.0)
        delta = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for c in tl.range(0, RANK, CHUNK, num_stages=1):
            us = tl.load(sums + c, mask=summed, other=0.0, cache_modifier=".cg")
            w = tl.load(ranks + c, mask=real, other=0.0)
            total = tl.sum(us, 0).to(w.dtype)
            delta = tl.dot(total, w.T, delta, input_precision="ieee")
        tl.store(places, (before.to(tl.float32) + delta).to(before.dtype), mask=there)
        for _ in range(WAYS):
            slot = least_above(own, slot, S)


def add_lora(
    x: Tensor,
    x_scales: Tensor | None,
    y: Tensor,
    slots: Tensor,
    own: LoraStack,
    *,
    ready: bool = False,
    invariant: bool = False,
    tile: LoraTile | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Add to each row of a linear layer's result what the row's adapter makes of its input.

    u is rounded to the type of the adapters, as between two layers; y is rounded once.

    Args:
        x: [T, K] as the base layer reads it: floats, int8 or e4m3. Columns beyond K are not read;
            of a shorter row the rest counts as zeros.
        x_scales: fp32, one element, [T], [T, 1] or [T, ceil(K / 128)]; None for floats.
        y: [T, N] in the type of the adapters, in place; rows may be parts of longer ones.
        slots: int32 [T], on the device: which adapter is a row's, -1 for none.
        own: The layer's adapters.
        ready: Whether x, its scales, slots and adapters were there before the kernel ahead of this,
            the base layer's, started: they are then read while that runs.
        invariant: Whether a row's bits are to be the same for any number of rows.
        tile: How to cut the products; by default a rule says.
        gather: Makes of u of this rank's inputs [splits, T, n] that of all ranks' [ranks, splits,
            T, n]; None where the inputs are all there are.

    Raises:
        ValueError: a shape or type does not fit.
    """
    _check(x, y, slots, own)
    rows, outputs = y.shape
    group, pitch, run_pitch = _strides(x_scales, *x.shape)
    if x.dtype == torch.float8_e4m3fn and capability() < 89:  # where kernels have no such type
        x, x_scales, group = _dequantized(x, x_scales, group).to(own.a.dtype), None, 0
    if not rows:
        return
    tile = tile or own.tile(rows, invariant)
    count, parts, rank, inputs = own.a.shape
    u = torch.empty((tile.splits, rows, parts * rank), dtype=torch.float32, device=x.device)
    second, third, *_ = (*own.starts[1:], outputs, outputs)
    down, ways = triton.cdiv(rows, tile.rows), tile.ways
    both = {"PARTS": parts, "RANK": rank, "ROWS": tile.rows, "WAYS": ways}
    both["num_warps"] = 4 if tile.rows < 64 else 8
    shrink_kernel[(down, ways, tile.splits * parts)](
        x, x_scales, slots, own.a, u, rows, count, inputs, min(x.shape[1], inputs), x.stride(0),
        pitch, run_pitch, INPUTS=tile.inputs, SPLITS=tile.splits, GROUP=group, READY=ready, **both,
        **overlap(),
    )  # fmt: skip
    u = u if gather is None else gather(u).flatten(0, 1)
    across = sum(triton.cdiv(len(own.outputs_of(i)), tile.outputs) for i in range(parts))
    expand_kernel[(across, down, ways)](
        u, slots, own.b, y, rows, count, outputs, second, third, y.stride(0),
        OUTPUTS=tile.outputs, SPLITS=len(u), HELD=triton.next_power_of_2(len(u)),
        CHUNK=min(rank, CHUNK), LINES=max(1, rank // 64), **both, **overlap(rows <= EARLY_ROWS),
    )  # fmt: skip


def _check(x: Tensor, y: Tensor, slots: Tensor, own: LoraStack) -> None:
    """Raise ValueError unless types and shapes are what the kernels take."""
    dtype, outputs = own.a.dtype, own.b.shape[1]
    require(
        x.dtype in (dtype, *QUANTIZED) and x.dim() == 2 and x.stride(1) == 1,
        f"x is {x.dtype} {tuple(x.shape)}; needed are rows of {dtype}, int8 or float8_e4m3fn",
    )
    require(
        y.dtype == dtype and y.shape == (len(x), outputs) and y.stride(1) == 1,
        f"y is {y.dtype} {tuple(y.shape)}; needed is {dtype} ({len(x)}, {outputs}), rows without "
        "gaps",
    )
    require(
        slots.dtype == torch.int32 and slots.shape == (len(x),) and slots.is_contiguous(),
        f"slots are {slots.dtype} {tuple(slots.shape)}; needed is contiguous int32 ({len(x)},)",
    )


def _strides(scales: Tensor | None, rows: int, columns: int) -> tuple[int, int, int]:
    """(inputs that share a scale or 0 for all of a row, elements between rows, between runs)."""
    if scales is None or scales.numel() == 1:
        return 0, 0, 0
    if scales.numel() == rows:
        return 0, scales.stride(0), 0
    runs = triton.cdiv(columns, BLOCK)
    require(
        scales.shape == (rows, runs),
        f"scales are {tuple(scales.shape)}; needed is one element, or ({rows},), ({rows}, 1) or "
        f"({rows}, {runs})",
    )
    return BLOCK, scales.stride(0), scales.stride(1)


def _dequantized(x: Tensor, scales: Tensor | None, group: int) -> Tensor:
    """Rows times their scales, fp32."""
    own = torch.ones(1, device=x.device) if scales is None else scales
    return x.float() * (
        own.repeat_interleave(group, 1)[:, : x.shape[1]] if group else own.reshape(-1, 1)
    )
