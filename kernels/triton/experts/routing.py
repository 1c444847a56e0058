"""Mixtures of experts: which experts a token goes to, and the sum of what they say.

    route     s = softmax(logits) or sigmoid(logits);  the k experts with the largest s + b,
              descending, and their weights w = f s, or f s / (the sum of theirs)
    combine   y[t] = sum_j w[t, j] e[t, j] + sigmoid(g[t]) s[t],   in the order of j, in fp32

Of equal s + b that of the expert with the lower number comes first. Where experts are in groups,
those of the groups with the largest sums of their best s + b alone can be chosen (DeepSeek-AI 2024,
arXiv 2412.19437, Eq. 12 to 16). The last term is that of an expert which every token goes to, where
there is one; without a gate it is s[t]. What is between is `kernels.triton.experts.sorting`.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

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
