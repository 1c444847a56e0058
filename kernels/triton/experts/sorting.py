"""Which rows go to which expert of a mixture, found and kept on the device.

A token goes to k of E experts: pair p = t k + j is token t with its j-th. The pairs of an expert,
in order, are cut into row tiles: a program of a linear layer multiplies the rows of one tile by the
weight of its expert. Weights of the experts lie one after the other. What is read and written
stays in the order of pairs, or of tokens where all k read the same row.

How many row tiles there are the host does not know, but a bound of it: of P pairs at most
n = min(P, E) experts have some, and cut P - n more rows into at most (P - n) / rows whole tiles.
Programs of tiles that are not there end at once.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import overlap, require, wait_and_announce

BLOCK = 1024  # pairs that a program takes at once
FEW_PAIRS = 128  # that one program sorts
FEW = 4  # with so many experts for each pair, or more, pairs are not sorted


@dataclass(frozen=True)
class SortedRows:
    """The pairs of a step, sorted by expert, in row tiles.

    Attributes:
        experts: int32 [row tiles], the expert of each; -1 where there is no such tile.
        pairs: int32 [row tiles, rows], the pairs of each; -1 where a tile has fewer. Of tiles that
            are not there, anything. None where each pair is a tile of its own.
        rows: Rows of a tile.
        count: Pairs, P.
        total: Experts, E.
        metadata_ready: Whether all this was there before the kernel ahead of the next started:
            weights are then asked for while that runs.
    """

    experts: Tensor
    pairs: Tensor | None
    rows: int
    count: int
    total: int
    metadata_ready: bool = False


@triton.jit(do_not_specialize=["P", "row_tiles"])
def sort_kernel(
    chosen, experts, pairs, P, E, row_tiles,
    BINS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program e finds the pairs of expert e; the last one more, tiles that are not there."""
    e = tl.program_id(0)
    i, own = tl.arange(0, BLOCK), tl.arange(0, BINS)
    wait_and_announce(OVERLAP)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, P, BLOCK):
        each = tl.load(chosen + start + i, mask=start + i < P, other=E)
        counts += tl.histogram(each, BINS)
    tiles = tl.where(own < E, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(own < e, tiles, 0), 0)
    if e == E:
        for start in range(first, row_tiles, BLOCK):
            tl.store(experts + start + i, -1, mask=start + i < row_tiles)
        return
    count = tl.sum(tl.where(own == e, counts, 0), 0)
    end = first + (count + ROWS - 1) // ROWS
    for start in range(first, end, BLOCK):
        tl.store(experts + start + i, e, mask=start + i < end)
    before = first * ROWS
    for start in range(0, P, BLOCK):
        each = tl.load(chosen + start + i, mask=start + i < P, other=E)
        mine = (each == e).to(tl.int32)
        tl.store(pairs + before + tl.cumsum(mine, 0) - 1, start + i, mask=mine > 0)
        before += tl.sum(mine, 0)
    rest = before + tl.arange(0, ROWS)
    tl.store(pairs + rest, -1, mask=rest < end * ROWS)


@triton.jit(do_not_specialize=["P", "row_tiles"])
def sort_few_kernel(
    chosen, experts, pairs, P, row_tiles,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FILL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same of up to BLOCK pairs by one program, beside which the next kernel finds room.

    Tiles ahead of a pair's expert are as many as pairs of lower experts that begin one.
    """
    i, place = tl.arange(0, BLOCK), tl.arange(0, FILL)
    wait_and_announce(OVERLAP)
    each = tl.load(chosen + i, mask=i < P, other=0x7FFFFFFF)
    tl.store(experts + i, -1, mask=i < row_tiles)
    for start in range(0, row_tiles * ROWS, FILL):
        tl.store(pairs + start + place, -1, mask=start + place < row_tiles * ROWS)
    tl.debug_barrier()
    earlier = (each[:, None] == each[None, :]) & (i[None, :] < i[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    begins = tl.where(rank % ROWS == 0, 1, 0)
    ahead = tl.where(each[None, :] < each[:, None], begins[None, :], 0)
    tile = tl.sum(ahead, 1) + rank // ROWS
    tl.store(experts + tile, each, mask=i < P)
    tl.store(pairs + tile * ROWS + rank % ROWS, i, mask=i < P)


def sort_by_expert(chosen: Tensor, experts: int, rows: int) -> SortedRows:
    """Sort pairs by expert, stably, and cut them into row tiles.

    Where pairs are few beside experts each is a row tile, as they come: the few of one expert find
    its weight in L2, and there is a kernel less.

    Args:
        chosen: int32 [T, k], numbers of experts, contiguous.
        experts: E.
        rows: Rows of a tile, a power of two.

    Raises:
        ValueError: a type or size is another.
    """
    require(
        chosen.dtype == torch.int32 and chosen.is_contiguous() and chosen.numel() > 0,
        f"chosen is {chosen.dtype} {tuple(chosen.shape)}; needed is contiguous int32, not empty",
    )
    require(rows > 0 and rows & (rows - 1) == 0, f"tiles of {rows} rows; needed is a power of two")
    count = chosen.numel()
    if FEW * count <= experts:
        return SortedRows(chosen.view(-1), None, rows, count, experts)
    most = min(count, experts)
    row_tiles = most + (count - most) // rows
    found = torch.empty(row_tiles, dtype=torch.int32, device=chosen.device)
    pairs = torch.empty((row_tiles, rows), dtype=torch.int32, device=chosen.device)
    if count <= FEW_PAIRS:
        sort_few_kernel[(1,)](
            chosen, found, pairs, count, row_tiles, BLOCK=max(32, triton.next_power_of_2(count)),
            ROWS=rows, FILL=1024, num_warps=8, enable_fp_fusion=True, **overlap(),
        )  # fmt: skip
    else:
        sort_kernel[(experts + 1,)](
            chosen, found, pairs, count, experts, row_tiles,
            BINS=max(32, triton.next_power_of_2(experts + 1)),
            BLOCK=min(BLOCK, triton.next_power_of_2(count)), ROWS=rows,
            enable_fp_fusion=True, **overlap(),
        )  # fmt: skip
    return SortedRows(found, pairs, rows, count, experts)
