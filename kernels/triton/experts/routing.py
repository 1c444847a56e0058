"""Mixtures of experts: which experts a token goes to, and the sum of what they say.

    route     p = softmax(logits);  the k largest, descending, and their experts
    combine   y[t] = sum_j p[t, j] e[t, j] + sigmoid(g[t]) s[t],   in the order of j, in fp32

Of equal probabilities that of the expert with the lower number comes first. The last term is that
of an expert which every token goes to, where there is one. What lies between is
`kernels.triton.experts.sorting`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import announce, overlap, require, wait

MOST_EXPERTS = 4096
PART = 1024  # of a row of the sum


@triton.jit
def route_kernel(
    logits, weights, chosen, E, K,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token); WIDTH and CHOSEN are E and K rounded up to powers of two."""
    t, e, j = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, CHOSEN)
    wait(OVERLAP)
    announce(OVERLAP)
    z = tl.load(logits + t * E + e, mask=e < E, other=-float("inf")).to(tl.float32)
    p = tl.exp(z - tl.max(z, 0))
    p = tl.where(e < E, tl.div_rn(p, tl.sum(p, 0) + tl.zeros_like(p)), -1.0)
    values, numbers = tl.zeros([CHOSEN], tl.float32), tl.zeros([CHOSEN], tl.int32)
    for i in range(K):
        best = tl.minimum(tl.argmax(p, 0), E - 1)  # of NaN it may be any
        values = tl.where(j == i, tl.max(p, 0), values)
        numbers = tl.where(j == i, best, numbers)
        p = tl.where(e == best, -1.0, p)
    if NORMALIZED:
        values = tl.div_rn(values, tl.sum(values, 0) + tl.zeros_like(values))
    tl.store(weights + t * K + j, values, mask=j < K)
    tl.store(chosen + t * K + j, numbers, mask=j < K)


@triton.jit
def combine_kernel(
    outputs, weights, shared, gate, out, H, K,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, part of WIDTH elements)."""
    t, i = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wait(OVERLAP)
    announce(OVERLAP)
    row, real = outputs + t.to(tl.int64) * K * H + i, i < H
    y = tl.load(row, mask=real, other=0.0).to(tl.float32) * tl.load(weights + t * K)
    for j in range(1, K):
        e = tl.load(row + j * H, mask=real, other=0.0).to(tl.float32)
        y += e * tl.load(weights + t * K + j)
    if SHARED:
        s = tl.load(shared + t.to(tl.int64) * H + i, mask=real, other=0.0).to(tl.float32)
        y += s * (1.0 / (1.0 + tl.exp(-tl.load(gate + t).to(tl.float32))))
    tl.store(out + t.to(tl.int64) * H + i, y.to(out.dtype.element_ty), mask=real)


def route(logits: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Probabilities and numbers of each token's experts.

    Args:
        logits: Float [T, E], contiguous.
        chosen: k.
        normalized: Whether probabilities are divided by the sum of those chosen.

    Returns:
        (fp32 [T, k], int32 [T, k]), descending.

    Raises:
        ValueError: a shape does not fit.
    """
    tokens, experts = logits.shape
    require(
        logits.is_contiguous() and 0 < chosen <= experts <= MOST_EXPERTS,
        f"{chosen} of {experts} experts; needed are contiguous logits of at most {MOST_EXPERTS}",
    )
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=logits.device)
    numbers = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    if tokens:
        width = triton.next_power_of_2(experts)
        route_kernel[(tokens,)](
            logits, weights, numbers, experts, chosen, WIDTH=width,
            CHOSEN=triton.next_power_of_2(chosen), NORMALIZED=normalized,
            num_warps=min(8, max(1, width // 256)), enable_fp_fusion=True, **overlap(),
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
        gate: Float [T, 1], the logit of its weight, or None.

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
        fits and (shared is None) == (gate is None) and (gate is None or gate.numel() == tokens),
        "an expert of all tokens has a contiguous row and a logit for each",
    )
    out = torch.empty((tokens, size), dtype=outputs.dtype, device=outputs.device)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(size, PART))](
            outputs, weights, shared, gate, out, size, chosen, WIDTH=PART,
            SHARED=shared is not None, enable_fp_fusion=False, **overlap(),
        )  # fmt: skip
    return out
