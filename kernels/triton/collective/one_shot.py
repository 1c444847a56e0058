"""One-shot all-reduce, with what follows it, of few rows: each rank gets the parts of all.

A program has a row. It pushes its part to every peer in words (`kernels.triton.collective.words`),
waits for theirs, adds all parts in the order of ranks, so that all ranks get the same bits, and
does what `kernels.triton.fused.add_rms_norm` does. Parts of 16 bits are added in fp32, and the sum
is not rounded before the residual is added; those of integers are added as integers, and then
scaled and rounded as the GEMM of one GPU does.

A row has two places for words, which the exchanges of the row take in turn, and counts them itself,
so that a captured launch can be replayed. Two are enough: a peer sends its part of exchange n + 1
when it has read those of n - 1, whose places that part takes.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# ruff: noqa: RUF005  (the compiler knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.collective.words import (
    GRAIN,
    count,
    load_grains,
    peek,
    push,
    receive,
    together,
    values_of,
)
from kernels.triton.common import ASM, wait_and_announce
from kernels.triton.fused import added, normed
from kernels.triton.rows import store_row

AT_ONCE = tl.constexpr(16)  # words of a grain, of several ranks, that are looked for at once


@triton.jit
def of_row(values, i, real):
    """Values that all rows share, loaded before a row's data are there."""
    return tl.load(values + i, mask=real, other=0.0)


@triton.jit
def scaled(acc, sx, sw, b, TYPE: tl.constexpr):
    """A row of integer sums as the GEMM of one GPU gives it in a float type."""
    y = acc.to(tl.float32) * (sx * sw)
    if b is not None:
        y += b
    return y.to(TYPE).to(tl.float32)


@triton.jit
def held_like(h, other):
    """h, each thread with those elements that it has of `other`: sums have one order then."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [h, other], dtype=tl.float32, is_pure=True, pack=1
        )
    return h


@triton.jit
def sum_side_by_side(
    mine, words, place, step, j, grains, epoch, fault, patience,
    RANK: tl.constexpr, WORLD: tl.constexpr, WORDS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The parts of a row from all ranks, those of several looked for at once."""
    sums = ()
    STEP: tl.constexpr = AT_ONCE // WORDS
    for first in tl.static_range(0, WORLD, STEP):
        found = ()
        for p in tl.static_range(first, min(first + STEP, WORLD)):
            if p == RANK:
                found = found + ((),)
            else:
                found = found + (peek(words + place + p * step, j, grains, epoch, WORDS),)
        for p in tl.static_range(first, min(first + STEP, WORLD)):
            if p == RANK:
                own = mine
            else:
                place_of = words + place + p * step
                seen = found[p - first]
                own = receive(seen, place_of, j, grains, epoch, fault, patience, p, WORDS)
            values = values_of(own, TYPE)
            if p == 0:
                sums = values
            else:
                more = ()
                for k in tl.static_range(8):
                    more = more + (sums[k] + values[k],)
                sums = more
    return together(sums)


@triton.jit
def sum_one_by_one(
    words, place, step, j, grains, epoch, fault, patience, WORLD: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Integer parts of a row from all ranks, this one too: registers hold but one rank's."""
    total = tl.zeros([j.shape[0] * GRAIN], tl.int32)
    for p in range(WORLD):
        own = words + place + p * step
        found = peek(own, j, grains, epoch, WORDS)
        total += together(receive(found, own, j, grains, epoch, fault, patience, p, WORDS))
    return total


@triton.jit
def sum_of_ranks(
    mine, words, place, step, j, grains, epoch, fault, patience, RANK: tl.constexpr,
    WORLD: tl.constexpr, WORDS: tl.constexpr, TYPE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The parts of a row from all ranks, added in their order.

    Args:
        mine: This rank's words of grains.
        words: Pointer to the words that peers have written here, and with ALL this rank, too.
        place: Of the row in the first rank's.
        step: From a rank's to the next one's.
    """
    if ALL:
        h = sum_one_by_one(words, place, step, j, grains, epoch, fault, patience, WORLD, WORDS)
    else:
        h = sum_side_by_side(
            mine, words, place, step, j, grains, epoch, fault, patience, RANK, WORLD, WORDS, TYPE
        )
    return h


@triton.jit
def store_sum(
    h, own, before, w, row, i, real, totals, outs, scales, scale, eps, pitch, SIZE,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store what `kernels.triton.fused.add_rms_norm` makes of a sum, in the memory of each rank of
    `totals`, `outs` and `scales`; the latter two are None where they are nobody's."""
    rounded = added(tl.where(real, h, 0.0), own, before, eps, SIZE, totals[0].dtype.element_ty)
    for p in tl.static_range(len(totals)):
        tl.store(totals[p] + row * SIZE + i, rounded, mask=real)
    if outs is not None:
        y, bad = normed(rounded.to(tl.float32), w, eps, SIZE)
        for p in tl.static_range(len(outs)):
            own_scales = None if scales is None else scales[p]
            store_row(
                y, row, 0, i, real, outs[p], own_scales, scale, None, bad, pitch, SIZE, STATIC,
                GROUP, BITS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pitch", "patience"])
def one_shot_kernel(
    x, words, epochs, fault, patience, x_scale, w_scale, bias,
    residual, after, weight, total, out, scales, scale, eps, pitch, slot, SIZE,
    RANK: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, PER_ROW: tl.constexpr,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OVERLAP: tl.constexpr,
    READY: tl.constexpr,
):  # fmt: skip
    """One row a program.

    Args:
        x: This rank's parts, as int32.
        words: Of every rank the words that its peers write: int64 [2, ranks, MOST, slot].
        epochs: int32 [MOST], exchanges of each row up to now.
        fault: int32, where a rank that did not arrive is reported.
        patience: Microseconds that are waited for one.
        w_scale: fp32 [SIZE] where parts are of integers, else None.
    """
    WORLD: tl.constexpr = len(words)
    FLOAT: tl.constexpr = total.dtype.element_ty
    TYPE: tl.constexpr = FLOAT if w_scale is None else tl.int32
    WORDS: tl.constexpr = 4 if w_scale is None else 8
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    real = i < SIZE
    grains = SIZE // GRAIN
    j = tl.minimum(tl.arange(0, WIDTH // GRAIN), grains - 1)
    w, before = None if weight is None else of_row(weight, i, real), None
    own = None if after is None else of_row(after, i, real)
    sw, sx = None if w_scale is None else of_row(w_scale, i, real), None
    b = None if bias is None else of_row(bias, i, real)
    if residual is not None and READY:
        before = tl.load(residual + row * SIZE + i, mask=real, other=0.0)
    wait_and_announce(OVERLAP)
    epoch = tl.load(epochs + row) + 1
    if w_scale is not None:
        sx = tl.load(x_scale + row * PER_ROW)
    mine = load_grains(x + row * (grains * WORDS), j, WORDS)
    step = MOST * slot
    place = ((epoch & 1) * (WORLD * MOST) + row) * slot
    ALL: tl.constexpr = WORLD > 4 and w_scale is not None
    for d in tl.static_range(0 if ALL else 1, WORLD):
        push(words[(RANK + d) % WORLD] + place + RANK * step, mine, j, grains, epoch)
    if residual is not None and not READY:
        before = tl.load(residual + row * SIZE + i, mask=real, other=0.0)
    patience = patience.to(tl.int64) * 1000
    h = sum_of_ranks(
        mine, words[RANK], place, step, j, grains, epoch, fault, patience,
        RANK, WORLD, WORDS, TYPE, ALL,
    )  # fmt: skip
    if w_scale is not None:
        h = scaled(h, sx, sw, b, FLOAT)
    if after is not None:
        h = held_like(h, before.to(tl.float32))
    store_sum(
        h, own, before, w, row, i, real, (total,), None if out is None else (out,),
        None if scales is None else (scales,), scale, eps, pitch, SIZE, STATIC, GROUP, BITS,
    )  # fmt: skip
    count(epochs + row, epoch)
