"""RMSNorms of q and k over all of their heads, as they lie in the rows of a joint projection.

Families that norm each head have it in `kernels.triton.attention.rope_cache`, whose programs hold
whole heads, not whole rows (OLMo Team 2024, arXiv 2501.00656, norm all of q and of k).
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import EARLY_ROWS, overlap, require, wait_and_announce


@triton.jit
def norm_projections_kernel(
    x, q_norm, k_norm, eps, pitch, Q_SIZE, K_SIZE, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program (row, 0 for q or 1 for k); WIDTH is the larger size, up to a power of two."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.where(part == 0, Q_SIZE, K_SIZE)
    i = tl.arange(0, WIDTH)
    real = i < size
    if part == 0:
        w = tl.load(q_norm + i, mask=real, other=0.0).to(tl.float32)
    else:
        w = tl.load(k_norm + i, mask=real, other=0.0).to(tl.float32)
    places = x + row * pitch + part * Q_SIZE + i
    wait_and_announce(OVERLAP)
    h = tl.load(places, mask=real, other=0.0).to(tl.float32)
    y = h * (1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / size + eps)) * w
    tl.store(places, y.to(x.dtype.element_ty), mask=real)


def norm_projections(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """Norm q and k in place.

    Args:
        qkv: Float [T, Q + K + V], contiguous: q, k and v of each token side by side.
        q_norm: Float [Q], the weight of the norm of q.
        k_norm: Float [K], the weight of the norm of k.
        eps: Added to the mean squares.

    Returns:
        `qkv`.

    Raises:
        ValueError: a shape does not fit.
    """
    sizes = len(q_norm), len(k_norm)
    require(
        qkv.dim() == 2 and qkv.is_contiguous() and sum(sizes) <= qkv.shape[1],
        f"qkv is {tuple(qkv.shape)}; needed is contiguous [T, {sum(sizes)} and more]",
    )
    if len(qkv):
        width = triton.next_power_of_2(max(sizes))
        norm_projections_kernel[(len(qkv), 2)](
            qkv, q_norm, k_norm, eps, qkv.shape[1], *sizes, WIDTH=width,
            num_warps=min(32, max(4, width // 512)), enable_fp_fusion=False,
            **overlap(len(qkv) <= EARLY_ROWS),
        )  # fmt: skip
    return qkv
