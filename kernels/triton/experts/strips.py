"""Which rows go to which expert of a mixture, found and kept on the device.

A token goes to k of E experts: pair p = t k + j is token t with its j-th. The pairs of an expert,
in order, are cut into strips of some rows: a program of a linear layer multiplies the rows of one
strip by the weight of its expert. Weights of the experts lie one behind the other. What is read and
written stays in the order of pairs, or of tokens where all k read the same row.

How many strips there are the host does not know, but a bound of it: of P pairs at most
n = min(P, E) experts have some, and cut P - n more rows into at most (P - n) / rows whole strips.
Programs of strips that are not there end at once.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import announce, overlap, require, wait
from kernels.triton.tuning import Tile, gemm_tile

BLOCK = 1024  # pairs that a program takes at once
COUNTED = 1 << 31  # elements whose places fit in 32 bits


@dataclass(frozen=True)
class Strips:
    """The rows of a step, by expert.

    Attributes:
        experts: int32 [strips], of each strip; -1 where there is none.
        pairs: int32 [strips, rows], those of each strip; -1 where a strip has fewer. Of strips
            that are not there, anything.
        count: Pairs.
        total: Experts.
        settled: Whether all this was there before the kernel ahead of the next started: weights
            are then asked for while that runs.
    """

    experts: Tensor
    pairs: Tensor
    count: int
    total: int
    settled: bool = False

    @property
    def rows(self) -> int:
        """Of a strip."""
        return self.pairs.shape[1]


def rows_of(x: Tensor, strips: Strips | None) -> tuple[int, dict[str, Any]]:
    """(rows of a result, what a kernel takes to find them, by name).

    Raises:
        ValueError: x has a row neither for each pair nor for each token.
    """
    wide = {"WIDE": x.numel() > COUNTED}
    if strips is None:
        return len(x), wide | {"experts": None, "pairs": None, "SHARE": 1, "SETTLED": False}
    require(
        len(x) > 0 and strips.count % len(x) == 0,
        f"x has {len(x)} rows; needed is one for each of {strips.count} pairs, or for each token",
    )
    places = {"experts": strips.experts, "pairs": strips.pairs, "SETTLED": strips.settled}
    return strips.count, wide | places | {"SHARE": strips.count // len(x)}


def tile_of(family: str, x: Tensor, outputs: int, inputs: int, strips: Strips | None) -> Tile:
    """The tile of a linear layer's few-row kernel for x, all at once or by strips."""
    if strips is None:
        return gemm_tile(family, x.device, len(x), outputs, inputs)
    return gemm_tile(family, x.device, strips.rows, outputs, inputs, len(strips.experts))


@triton.jit
def strip_rows(
    strip, M, experts, pairs,
    SHARE: tl.constexpr, ROWS: tl.constexpr, SETTLED: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of a strip: (its expert, rows of the result, rows of x, whether they exist).

    Without `experts` all rows are those of one weight. If WIDE, rows of x are int64.
    """
    m = strip * ROWS + tl.arange(0, ROWS)
    expert, row, there = strip, m, m < M
    if experts is not None:
        if not SETTLED:
            wait(OVERLAP)
        expert = tl.load(experts + strip)
        m = tl.load(pairs + m)
        row, there = m // SHARE, m >= 0
    if WIDE:
        row = row.to(tl.int64)
    return expert, m, row, there


@triton.jit(do_not_specialize=["P", "strips"])
def strips_kernel(
    chosen, experts, pairs, P, E, strips,
    BINS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program e finds the pairs of expert e; the last one more, the strips that are not there."""
    e = tl.program_id(0)
    i, own = tl.arange(0, BLOCK), tl.arange(0, BINS)
    wait(OVERLAP)
    announce(OVERLAP)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, P, BLOCK):
        each = tl.load(chosen + start + i, mask=start + i < P, other=E)
        counts += tl.histogram(each, BINS)
    each_strips = tl.where(own < E, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(own < e, each_strips, 0), 0)
    if e == E:
        for start in range(first, strips, BLOCK):
            tl.store(experts + start + i, -1, mask=start + i < strips)
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


def cut(chosen: Tensor, experts: int, rows: int) -> Strips:
    """Sort pairs by expert, stably, and cut them into strips.

    Args:
        chosen: int32 [T, k], numbers of experts, contiguous.
        experts: E.
        rows: Of a strip, a power of two.

    Raises:
        ValueError: a type or size is another.
    """
    require(
        chosen.dtype == torch.int32 and chosen.is_contiguous() and chosen.numel() > 0,
        f"chosen is {chosen.dtype} {tuple(chosen.shape)}; needed is contiguous int32, not empty",
    )
    require(rows > 0 and rows & (rows - 1) == 0, f"strips of {rows} rows; needed is a power of two")
    count = chosen.numel()
    most = min(count, experts)
    strips = most + (count - most) // rows
    found = torch.empty(strips, dtype=torch.int32, device=chosen.device)
    pairs = torch.empty((strips, rows), dtype=torch.int32, device=chosen.device)
    strips_kernel[(experts + 1,)](
        chosen, found, pairs, count, experts, strips,
        BINS=max(32, triton.next_power_of_2(experts + 1)),
        BLOCK=min(BLOCK, max(128, triton.next_power_of_2(count))), ROWS=rows, **overlap(),
    )  # fmt: skip
    return Strips(found, pairs, count, experts)
