"""The kernels of an all-reduce, with what follows it: one shot of few rows, or two of more.

One shot: each rank gets the parts of all. A program has a row. It pushes its part to every peer in
words (`kernels.triton.collective.words`), waits for theirs, adds all parts in the order of ranks,
so that all ranks get the same bits, and does what `kernels.triton.fused.add_rms_norm` does. Parts
of 16 bits are added in fp32, and the sum is not rounded before the residual is added; those of
integers are added as integers, and then scaled and rounded as the GEMM of one GPU does. A row has
two places for words, which the exchanges of the row take in turn, and counts them itself, so that a
captured launch can be replayed. Two are enough: a peer sends its part of exchange n + 1 when it has
read those of n - 1, whose places that part takes.

Two shots: each rank sums some rows, and sends results. Row r belongs to rank r modulo their number.
A program of a row that is not this rank's sends its part to the owner and ends; that of an own row
waits for the parts, adds them in the order of ranks, does what follows and writes the results into
every rank's memory. The last program waits for the rows of the others. All of it goes by flags, and
bits are those of one shot.

No buffer is overwritten before it has been read. A part is sent when this rank has the result of
the exchange of the row before, for which its owner has read the part before. A result is written
into a rank's memory when that rank's part has arrived: what ran ahead of this kernel on that rank's
stream has ended, and with it whatever read the place. There is no deadlock, since devices start
programs in the order of their numbers: all parts of the first row that is not done are on their
way.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportMissingImports=false
# ruff: noqa: RUF005  (the compiler knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.collective.words import (
    GRAIN,
    PARTS,
    RESULTS,
    await_flag,
    count,
    fence,
    load_grains,
    peek,
    push,
    raise_flag,
    receive,
    together,
    values_of,
)
from kernels.triton.common import ASM, wait_and_announce
from kernels.triton.fused import added, normed, store_row

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


FLAGS = tl.constexpr(1024)  # results that are waited for at once


@triton.jit
def send_part(x, parts, arrived, row, i, real, epoch, SIZE, slot, RANK: tl.constexpr):
    """This rank's part of a row into its owner's memory."""
    WORLD: tl.constexpr = len(parts)
    part = tl.load(x + row * SIZE + i, mask=real, other=0)
    for p in tl.static_range(WORLD):
        if p != RANK and row % WORLD == p:
            tl.store(parts[p] + (row // WORLD * WORLD + RANK) * slot + i, part, mask=real)
            fence(epoch)
            raise_flag(arrived[p] + row * WORLD + RANK, epoch)


@triton.jit
def sum_parts(
    x, parts, arrived, row, i, real, epoch, fault, patience, SIZE, slot,
    RANK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """The parts of an own row, added in the order of ranks: fp32 or int32 [WIDTH]."""
    mine = tl.load(x + row * SIZE + i, mask=real, other=0)
    for p in tl.static_range(WORLD):
        if p != RANK:
            await_flag(arrived + row * WORLD + p, epoch, 1, fault, patience, PARTS + p)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int32 else tl.float32
    h = tl.zeros_like(i).to(SUM)
    for p in tl.static_range(WORLD):
        part = mine
        if p != RANK:
            place = parts + (row // WORLD * WORLD + p) * slot + i
            part = tl.load(place, mask=real, other=0, cache_modifier=".cg")
        h = part.to(SUM) if p == 0 else h + part.to(SUM)
    return h


@triton.jit
def await_rows(done, seen, rows, fault, patience, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Wait for the results of all rows of others."""
    for first in range(0, rows, FLAGS):
        row = first + tl.arange(0, FLAGS)
        there = row < rows
        epoch = tl.load(seen + row, mask=there, other=0) + 1
        needed = (there & (row % WORLD != RANK)).to(tl.int32)
        peer = RESULTS + row % WORLD
        await_flag(done + tl.where(there, row, 0), epoch, needed, fault, patience, peer)
        tl.store(seen + row, epoch, mask=there)


@triton.jit(do_not_specialize=["rows", "pitch", "patience"])
def two_shot_kernel(
    x, parts, arrived, done, turns, seen, fault, patience, x_scale, w_scale, bias,
    residual, after, weight, totals, outs, scales, scale, eps, rows, pitch, slot, SIZE,
    RANK: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, PER_ROW: tl.constexpr,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row a program, and one for all rows of others.

    Args:
        x: This rank's parts [rows, SIZE].
        parts: Of every rank those that its peers send, in the type of x, `slot` apart: for each own
            row one of every rank.
        arrived: Of every rank int32 [most rows, ranks], the exchange whose part has come.
        done: Of every rank int32 [most rows], the exchange whose result has come.
        turns: int32 [most rows], exchanges of each row up to now, as its program counts them.
        seen: The same, as the last program counts them.
        totals: Of every rank the sums [rows, SIZE]; if not WHOLE, own rows are written alone.
        outs: Of every rank the rows [rows, SIZE]; None where they are the sums.
        scales: Of every rank the scales of rows; None where they have none of their own.
    """
    WORLD: tl.constexpr = len(parts)
    FLOAT: tl.constexpr = totals[0].dtype.element_ty
    number = tl.program_id(0)
    patience = patience.to(tl.int64) * 1000
    wait_and_announce(OVERLAP)
    if number == rows:
        await_rows(done[RANK], seen, rows, fault, patience, RANK, WORLD)
        return
    row = number.to(tl.int64)
    i = tl.arange(0, WIDTH)
    real = i < SIZE
    epoch = tl.load(turns + row) + 1
    if row % WORLD != RANK:
        send_part(x, parts, arrived, row, i, real, epoch, SIZE, slot, RANK)
        count(turns + row, epoch)
        return
    w, before = None if weight is None else of_row(weight, i, real), None
    own = None if after is None else of_row(after, i, real)
    if residual is not None:
        before = tl.load(residual + row * SIZE + i, mask=real, other=0.0)
    h = sum_parts(
        x, parts[RANK], arrived[RANK], row, i, real, epoch, fault, patience, SIZE, slot, RANK, WORLD
    )
    if w_scale is not None:
        sx = tl.load(x_scale + row * PER_ROW)
        sw, b = of_row(w_scale, i, real), None if bias is None else of_row(bias, i, real)
        h = scaled(h, sx, sw, b, FLOAT)
    store_sum(
        h, own, before, w, row, i, real, totals if WHOLE else (totals[RANK],), outs, scales, scale,
        eps, pitch, SIZE, STATIC, GROUP, BITS,
    )  # fmt: skip
    fence(epoch)
    for p in tl.static_range(WORLD):
        if p != RANK:
            raise_flag(done[p] + row, epoch)
    count(turns + row, epoch)
