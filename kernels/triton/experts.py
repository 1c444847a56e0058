"""Mixtures of experts: which experts a token goes to, in what order, and the sum of what they say.

    route     s = softmax(logits) or sigmoid(logits);  the k experts with the largest s + b,
              descending, and their weights w = f s, or f s / (the sum of theirs)
    combine   y[t] = sum_j w[t, j] e[t, j] + sigmoid(g[t]) s[t],   in the order of j, in fp32

Of equal s + b that of the expert with the lower number comes first. Where experts are in groups,
those of the groups with the largest sums of their best s + b alone can be chosen (DeepSeek-AI 2024,
arXiv 2412.19437, Eq. 12 to 16). The last term is that of an expert which every token goes to, where
there is one; without a gate it is s[t].

In between rows are sorted by their expert, on the device. A token goes to k of E experts: pair
p = t k + j is token t with its j-th. The pairs of an expert, in order, are cut into row tiles: a
program of a linear layer multiplies the rows of one tile by the weight of its expert. Weights of
the experts lie one after the other. What is read and written stays in the order of pairs, or of
tokens where all k read the same row.

How many row tiles there are the host does not know, but a bound of it: of P pairs at most
n = min(P, E) experts have some, and cut P - n more rows into at most (P - n) / rows whole tiles.
Programs of tiles that are not there end at once.
"""

# pyright: reportCallIssue=false, reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import overlap, require, wait_and_announce

MOST_EXPERTS = 4096
PART = 1024  # of a row of the sum
AT_ONCE = tl.constexpr(128)  # experts, of which any number is chosen in one step


@triton.jit
def route_kernel(
    logits, correction, weights, chosen, E, K, G, SIZE, CHOSEN_GROUPS, factor,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BEST: tl.constexpr, LIMITED: tl.constexpr,
    CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token); GROUPS, WIDTH and CHOSEN are G groups, the SIZE experts of one, and K
    rounded up to powers of two. Place i of a row is expert i % WIDTH of group i / WIDTH."""
    t, i, j = tl.program_id(0), tl.arange(0, GROUPS * WIDTH), tl.arange(0, CHOSEN)
    e = i // WIDTH * SIZE + i % WIDTH
    real = (i % WIDTH < SIZE) & (e < E)
    bias = tl.zeros([GROUPS * WIDTH], tl.float32)
    if correction is not None:
        bias = tl.load(correction + e, mask=real, other=0.0)
    wait_and_announce(OVERLAP)
    z = tl.load(logits + t * E + e, mask=real, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        s = tl.div_rn(tl.full([GROUPS * WIDTH], 1.0, tl.float32), 1.0 + tl.exp(-z))
    else:
        s = tl.exp(z - tl.max(z, 0))
        s = tl.div_rn(s, tl.sum(s, 0) + tl.zeros_like(s))
    rank = tl.where(real, s + bias, -float("inf"))
    if LIMITED:
        rank = of_best_groups(rank, G, CHOSEN_GROUPS, GROUPS, WIDTH, BEST)
    if GROUPS * WIDTH <= AT_ONCE:
        values, numbers = best_at_once(rank, s, e, i, j, K)
    else:
        values, numbers = tl.zeros([CHOSEN], tl.float32), tl.zeros([CHOSEN], tl.int32)
        for n in range(K):
            best = tl.argmax(rank, 0)
            values = tl.where(j == n, tl.sum(tl.where(i == best, s, 0.0), 0), values)
            numbers = tl.where(j == n, best // WIDTH * SIZE + best % WIDTH, numbers)
            rank = tl.where(i == best, -float("inf"), rank)
    numbers = tl.minimum(numbers, E - 1)  # of NaN it may be any
    if NORMALIZED:
        values = tl.div_rn(values, tl.sum(values, 0) + 1e-20 + tl.zeros_like(values))
    tl.store(weights + t * K + j, values * factor, mask=j < K)
    tl.store(chosen + t * K + j, numbers, mask=j < K)


@triton.jit
def best_at_once(rank, s, e, i, j, K):
    """Scores s and numbers e of the K experts with the largest ranks: how many of places i are
    ahead of each is counted, which takes one step in place of one for each that is chosen."""
    ahead = (rank[None, :] > rank[:, None]) | (
        (rank[None, :] == rank[:, None]) & (i[None, :] < i[:, None])
    )
    own = (tl.sum(ahead.to(tl.int32), 1)[:, None] == j[None, :]) & (j < K)[None, :]
    return tl.sum(tl.where(own, s[:, None], 0.0), 0), tl.sum(tl.where(own, e[:, None], 0), 0)


@triton.jit
def of_best_groups(
    rank, G, CHOSEN_GROUPS, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """Ranks of the experts of the best groups, -inf of all others."""
    left, column = tl.reshape(rank, [GROUPS, WIDTH]), tl.arange(0, WIDTH)
    own = tl.max(left, 1)
    if BEST == 2:
        left = tl.where(column[None, :] == tl.argmax(left, 1)[:, None], -float("inf"), left)
        own += tl.max(left, 1)
    g = tl.arange(0, GROUPS)
    own = tl.where(g < G, own, -float("inf"))
    taken = tl.zeros([GROUPS], tl.int32)
    for _ in range(CHOSEN_GROUPS):
        best = tl.argmax(own, 0)
        taken = tl.where(g == best, 1, taken)
        own = tl.where(g == best, -float("inf"), own)
    limited = tl.where(taken[:, None] > 0, tl.reshape(rank, [GROUPS, WIDTH]), -float("inf"))
    return tl.reshape(limited, [GROUPS * WIDTH])


@triton.jit
def combine_kernel(
    outputs, weights, shared, gate, out, H,
    K: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, part of WIDTH elements); all K rows are on their way at once."""
    t, i = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wait_and_announce(OVERLAP)
    row, real = outputs + t.to(tl.int64) * K * H + i, i < H
    y = tl.load(row, mask=real, other=0.0).to(tl.float32) * tl.load(weights + t * K)
    for j in tl.static_range(1, K):
        e = tl.load(row + j * H, mask=real, other=0.0).to(tl.float32)
        y += e * tl.load(weights + t * K + j)
    if shared is not None:
        s = tl.load(shared + t.to(tl.int64) * H + i, mask=real, other=0.0).to(tl.float32)
        if gate is not None:
            s *= 1.0 / (1.0 + tl.exp(-tl.load(gate + t).to(tl.float32)))
        y += s
    tl.store(out + t.to(tl.int64) * H + i, y.to(out.dtype.element_ty), mask=real)


def route(
    logits: Tensor,
    chosen: int,
    normalized: bool,
    *,
    sigmoid: bool = False,
    correction: Tensor | None = None,
    groups: int = 1,
    chosen_groups: int = 1,
    best_of_group: int = 1,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts.

    Args:
        logits: Float [T, E], contiguous.
        chosen: k.
        normalized: Whether weights are divided by the sum of those chosen.
        sigmoid: Whether a score is the logit's sigmoid; without, softmax over all.
        correction: fp32 [E], added to scores where experts are chosen, or None.
        groups: How many groups of neighbours the experts are in.
        chosen_groups: Of how many of them a token's experts are.
        best_of_group: How many of a group's best scores, 1 or 2, are added up to its own.
        factor: Of the weights.

    Returns:
        (fp32 [T, k], int32 [T, k]), the best first.

    Raises:
        ValueError: a shape does not fit.
    """
    tokens, experts = logits.shape
    require(
        logits.is_contiguous() and 0 < chosen <= experts <= MOST_EXPERTS,
        f"{chosen} of {experts} experts; needed are contiguous logits of at most {MOST_EXPERTS}",
    )
    size = experts // groups
    require(
        size * groups == experts and 0 < best_of_group <= min(2, size)
        and chosen <= chosen_groups * size <= experts,
        f"{chosen} of {experts} experts from {chosen_groups} of {groups} groups by their "
        f"{best_of_group} best (1 or 2) does not come out even",
    )  # fmt: skip
    require(
        correction is None or (correction.dtype == torch.float32 and correction.numel() == experts),
        "a correction is fp32, one for each expert",
    )
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=logits.device)
    numbers = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    if tokens:
        shape = {"GROUPS": triton.next_power_of_2(groups), "WIDTH": triton.next_power_of_2(size)}
        places = shape["GROUPS"] * shape["WIDTH"]
        route_kernel[(tokens,)](
            logits, correction, weights, numbers, experts, chosen, groups, size, chosen_groups,
            factor, **shape, BEST=best_of_group, LIMITED=chosen_groups < groups,
            CHOSEN=triton.next_power_of_2(chosen), SIGMOID=sigmoid, NORMALIZED=normalized,
            num_warps=min(8, max(1, places // (32 if places <= AT_ONCE.value else 256))),
            enable_fp_fusion=True, **overlap(),
        )  # fmt: skip
    return weights, numbers


def combine(
    outputs: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """The sum of a token's experts.

    Args:
        outputs: Float [T k, H], what they say, contiguous.
        weights: fp32 [T, k].
        shared: Like the result, what the expert of all tokens says, or None.
        gate: Float [T, 1], the logit of its weight; None where that is 1.

    Returns:
        [T, H] in the type of `outputs`.

    Raises:
        ValueError: a shape does not fit.
    """
    (tokens, chosen), size = weights.shape, outputs.shape[-1]
    require(
        outputs.shape == (tokens * chosen, size) and outputs.is_contiguous(),
        f"outputs are {tuple(outputs.shape)}; needed is contiguous [{tokens * chosen}, H]",
    )
    fits = shared is None or (shared.shape == (tokens, size) and shared.is_contiguous())
    require(
        fits and (gate is None or (shared is not None and gate.numel() == tokens)),
        "an expert of all tokens has a contiguous row, and perhaps a logit, for each",
    )
    out = torch.empty((tokens, size), dtype=outputs.dtype, device=outputs.device)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(size, PART))](
            outputs, weights, shared, gate, out, size, K=chosen, WIDTH=PART,
            enable_fp_fusion=False, **overlap(),
        )  # fmt: skip
    return out


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
