"""Rotary embedding (Su et al. 2021) of q and k in the two-halves layout, and nothing else.

Where q and k go on to the cache from here, `kernels.triton.attention.rope_cache` does both at once.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require


@triton.jit
def rotate_kernel(
    q, k, cos, sin, q_out, k_out, q_pitch, k_pitch,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Program (token, head of q or k); WIDE is TURNED / 2, and REST what stays, rounded up to a
    power of two."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = TURNED // 2
    i = tl.arange(0, WIDE)
    real = i < half
    c = tl.load(cos + token * TURNED + i, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + token * TURNED + i, mask=real, other=0.0).to(tl.float32)
    x, out = q + token * q_pitch + head * DIM, q_out + (token * Q_HEADS + head) * DIM
    if head >= Q_HEADS:
        own = head - Q_HEADS
        x, out = k + token * k_pitch + own * DIM, k_out + (token * HEADS + own) * DIM
    a = tl.load(x + i, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + half + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + i, (a * c - b * s).to(out.dtype.element_ty), mask=real)
    tl.store(out + half + i, (b * c + a * s).to(out.dtype.element_ty), mask=real)
    if TURNED < DIM:
        j = TURNED + tl.arange(0, REST)
        tl.store(out + j, tl.load(x + j, mask=j < DIM, other=0.0), mask=j < DIM)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn channels i and i + R / 2 of each head of q and k by their token's angles.

    Args:
        q: Float [T, Hq, D]; rows may be parts of longer ones.
        k: Float [T, Hkv, D] of the same type, whose rows may be such parts too.
        cos: Float [T, R], the halves equal; R at most D: channels from R on stay as they are.
        sin: Float [T, R], laid out as `cos`.

    Returns:
        (q, k) turned, new and contiguous.

    Raises:
        ValueError: a shape or type does not fit.
    """
    (tokens, q_heads, dim), heads, turned = q.shape, k.shape[1], cos.shape[-1]
    require(
        k.shape == (tokens, heads, dim) and k.dtype == q.dtype and turned % 2 == 0,
        f"q is {q.dtype} {tuple(q.shape)} and k {k.dtype} {tuple(k.shape)}; they differ in heads "
        "alone, and an even number of channels turns",
    )
    require(
        cos.shape == (tokens, turned) and turned <= dim and sin.shape == cos.shape,
        f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; needed are {(tokens, dim)}",
    )
    q, k = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if tokens:
        rotate_kernel[(tokens, q_heads + heads)](
            q, k, cos.contiguous(), sin.contiguous(), q_out, k_out, q.stride(0), k.stride(0),
            Q_HEADS=q_heads, HEADS=heads, DIM=dim, TURNED=turned,
            WIDE=triton.next_power_of_2(turned // 2), REST=triton.next_power_of_2(dim - turned),
            num_warps=1,
        )  # fmt: skip
    return q_out, k_out
