"""Two-shot all-reduce, with what follows it, of more rows: each rank sums some, and sends results.

Row r belongs to rank r modulo their number. A program of a row that is not this rank's sends its
part to the owner and ends; that of an own row waits for the parts, adds them in the order of ranks,
does what `kernels.triton.fused.add_rms_norm` does and writes the results into every rank's memory.
The last program waits for the rows of the others. All of it goes by flags
(`kernels.triton.collective.words`), and bits are those of `kernels.triton.collective.one_shot`.

No buffer is overwritten before it has been read. A part is sent when this rank has the result of
the exchange of the row before, for which its owner has read the part before. A result is written
into a rank's memory when that rank's part has arrived: what ran ahead of this kernel on that rank's
stream has ended, and with it whatever read the place. There is no deadlock, since devices start
programs in the order of their numbers: all parts of the first row that is not done are on their
way.
"""

# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.collective.one_shot import of_row, scaled, store_sum
from kernels.triton.collective.words import PARTS, RESULTS, await_flag, count, fence, raise_flag
from kernels.triton.common import wait_and_announce

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
