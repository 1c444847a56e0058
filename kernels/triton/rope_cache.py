"""Rotary embedding, quantization and the write to the paged cache, in one pass.

A program takes 16 tokens of a head, or of four: of q it stores the rotated rows; of k it rotates,
quantizes and stores rows of [pages, Hkv, 64, D]; of v it quantizes and stores columns of
[pages, Hkv, D, 64], the layout that `kernels.triton.attention` reads. Rotation (Su et al. 2021) in
the two-halves layout of Llama checkpoints; K is not rounded between rotation and quantization.
Scales are those of a head ([Hkv]), of its channels ([Hkv, D], K alone), or are taken from each
token's head ([pages, Hkv, 64]: absmax / 127, or / 448 for e4m3) and written beside it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import absmax_scale, quantize, require

TOKENS = 16


@triton.jit
def rotated(x, cos, sin, place, real):
    """Both halves of rotated rows, fp32 [tokens, heads, DIM / 2], from x + place."""
    half: tl.constexpr = cos.shape[2]
    a = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + place + half, mask=real, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def write_keys(
    a, b, head, slot, written, k_pages, k_scale, HEADS: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Quantize both halves of rotated keys [tokens, heads, DIM / 2] and put them in rows."""
    TYPE: tl.constexpr = k_pages.dtype.element_ty
    half: tl.constexpr = a.shape[2]
    i = tl.arange(0, half)[None, None, :]
    line = ((slot // 64)[:, None] * HEADS + head[None, :]) * 64 + (slot % 64)[:, None]
    scale_a = tl.zeros_like(a)
    scale_b = tl.zeros_like(b)
    if SCALES == 3:
        absmax = tl.maximum(tl.max(tl.abs(a), 2), tl.max(tl.abs(b), 2))
        own = absmax_scale(absmax, TYPE).to(k_scale.dtype.element_ty)
        tl.store(k_scale + line, own, mask=written[:, None])
        scale_a += own.to(tl.float32)[:, :, None]
        scale_b += own.to(tl.float32)[:, :, None]
    elif SCALES == 2:
        scale_a += tl.load(k_scale + head[None, :, None] * (2 * half) + i)
        scale_b += tl.load(k_scale + head[None, :, None] * (2 * half) + half + i)
    else:
        scale_a += tl.load(k_scale + head)[None, :, None]
        scale_b += tl.load(k_scale + head)[None, :, None]
    place = k_pages + line[:, :, None] * (2 * half) + i
    tl.store(place, quantize(a, scale_a, TYPE), mask=written[:, None, None])
    tl.store(place + half, quantize(b, scale_b, TYPE), mask=written[:, None, None])


@triton.jit
def write_values(
    x, head, slot, written, v_pages, v_scale, HEADS: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Quantize values [tokens, heads, DIM] and put them in columns."""
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    DIM: tl.constexpr = x.shape[2]
    line = ((slot // 64)[:, None] * HEADS + head[None, :]) * 64
    scale = tl.zeros_like(x)
    if SCALES == 3:
        own = absmax_scale(tl.max(tl.abs(x), 2), TYPE).to(v_scale.dtype.element_ty)
        tl.store(v_scale + line + (slot % 64)[:, None], own, mask=written[:, None])
        scale += own.to(tl.float32)[:, :, None]
    else:
        scale += tl.load(v_scale + head)[None, :, None]
    columns = tl.permute(quantize(x, scale, TYPE), (1, 2, 0))  # [heads, DIM, tokens]
    place = tl.trans(line * DIM + (slot % 64)[:, None])[:, None, :]
    place += (tl.arange(0, DIM) * 64)[None, :, None]
    tl.store(v_pages + place, columns, mask=written[None, None, :])


@triton.jit(do_not_specialize=["T"])
def rope_write_kernel(
    q, k, v, cos, sin, out, k_pages, v_pages, slots, k_scale, v_scale, T, q_pitch, k_pitch, v_pitch,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    PER: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, PER heads of q, then of k, then of v)."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1) * PER + tl.arange(0, PER)
    real = (token < T)[:, None, None]
    slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
    written = slot >= 0
    slot = tl.where(written, slot, 0)
    i = tl.arange(0, DIM // 2)[None, None, :]
    t = token[:, None, None]
    if tl.program_id(1) * PER < Q_HEADS + HEADS:
        c = tl.load(cos + t * DIM + i, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sin + t * DIM + i, mask=real, other=0.0).to(tl.float32)
        if tl.program_id(1) * PER < Q_HEADS:
            h = head[None, :, None]
            a, b = rotated(q, c, s, t * q_pitch + h * DIM + i, real)
            place = out + (t * Q_HEADS + h) * DIM + i
            tl.store(place, a.to(out.dtype.element_ty), mask=real)
            tl.store(place + DIM // 2, b.to(out.dtype.element_ty), mask=real)
        else:
            own = head - Q_HEADS
            a, b = rotated(k, c, s, t * k_pitch + own[None, :, None] * DIM + i, real)
            write_keys(a, b, own, slot, written, k_pages, k_scale, HEADS, SCALES)
    else:
        own = head - Q_HEADS - HEADS
        d = tl.arange(0, DIM)[None, None, :]
        x = tl.load(v + t * v_pitch + own[None, :, None] * DIM + d, mask=real, other=0.0)
        write_values(x.to(tl.float32), own, slot, written, v_pages, v_scale, HEADS, SCALES)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> Tensor:
    """Rotate q and k; put k and v into the cache.

    Args:
        q: Float [T, Hq, D]; rows may be parts of longer ones, as of a joint projection's result.
        k: [T, Hkv, D], likewise.
        v: [T, Hkv, D], likewise.
        cos: Float [T, D] of each token's position, the halves equal.
        sin: [T, D], likewise.
        k_pages: int8 or e4m3 [pages, Hkv, 64, D], changed in place.
        v_pages: [pages, Hkv, D, 64], likewise.
        slots: int32 or int64 [T], page * 64 + offset, no two alike; negative where none is written.
        k_scale: fp32 [Hkv] or [Hkv, D]; or fp32 or fp16 [pages, Hkv, 64], changed in place.
        v_scale: fp32 [Hkv]; or [pages, Hkv, 64], changed in place.

    Returns:
        Rotated q [T, Hq, D], contiguous.

    Raises:
        ValueError: a shape or type does not fit.
    """
    (tokens, q_heads, dim), (pages, heads, page, _) = q.shape, k_pages.shape
    for name, x, count in (("q", q, q_heads), ("k", k, heads), ("v", v, heads)):
        require(
            tuple(x.shape) == (tokens, count, dim) and x.stride()[1:] == (dim, 1),
            f"{name} is {tuple(x.shape)} with strides {x.stride()}; needed is "
            f"{(tokens, count, dim)}, heads side by side",
        )
    require(page == 64 and dim & (dim - 1) == 0, f"pages of {page} tokens, heads of {dim}")
    require(
        tuple(v_pages.shape) == (pages, heads, dim, 64) and v_pages.dtype == k_pages.dtype,
        f"v_pages is {v_pages.dtype} {tuple(v_pages.shape)}; needed is {k_pages.dtype} "
        f"{(pages, heads, dim, 64)}, tokens last",
    )
    per_token = k_scale.dim() == 3
    shapes = ((heads,), (heads, dim), (pages, heads, 64))
    require(
        tuple(k_scale.shape) == shapes[k_scale.dim() - 1]
        and tuple(v_scale.shape) == shapes[2 if per_token else 0],
        f"scales are {tuple(k_scale.shape)} and {tuple(v_scale.shape)}; needed are {shapes}",
    )
    for name, x, size in (("cos", cos, dim), ("sin", sin, dim), ("slots", slots, 1)):
        require(
            x.numel() == tokens * size and x.is_contiguous(),
            f"{name} is {tuple(x.shape)}; needed are {tokens} contiguous rows of {size}",
        )
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    per = math.gcd(4, math.gcd(q_heads, heads)) if tokens > 256 else 1  # few tokens: more programs
    if tokens:
        rope_write_kernel[(triton.cdiv(tokens, TOKENS), (q_heads + 2 * heads) // per)](
            q, k, v, cos, sin, out, k_pages, v_pages, slots, k_scale, v_scale, tokens,
            q.stride(0), k.stride(0), v.stride(0), Q_HEADS=q_heads, HEADS=heads, DIM=dim,
            TOKENS=TOKENS, PER=per, SCALES=k_scale.dim(), enable_fp_fusion=False,
        )  # fmt: skip
    return out
