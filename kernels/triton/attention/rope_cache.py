"""Norm of heads, rotary embedding, quantization and the write to the paged cache, in one pass.

The first programs take a few tokens of a few heads of q or k: they norm them where weights are
given (RMSNorm of every head, as Qwen3 does), rotate them (Su et al. 2021, in the two-halves layout
of Llama checkpoints), and store q's rows, or quantize k and store rows of [pages, Hkv, 64, D].
Nothing is rounded in between. The other programs quantize v and store columns of
[pages, Hkv, D, 64], the layout that attention reads (`kernels.triton.attention.paged_cache`).

Columns are the costly part: a token's values lie 64 bytes apart. Where there are many tokens a
program takes 64 of a head. If they stand one after another, wherever the first stands in its page,
they are permuted so that column j of the program is place j of a page: pieces of 16 places are then
stored whole, to the first page from that place on, to the second before it; only the piece that
both pages share goes byte by byte, as do tokens that do not stand so (ends of prompts, decodes).

Scales are those of a head ([Hkv]), of its channels ([Hkv, D], K alone), or are taken from each
token's head ([pages, Hkv, 64]: absmax / 127, or / 448 for e4m3) and written beside it; a cache of
bf16 or fp16 has none.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.paged_cache import check_pages, scale_kind
from kernels.triton.common import (
    EARLY_ROWS,
    absmax_scale,
    announce,
    overlap,
    quantize,
    require,
    wait,
)

FEW = 256  # tokens up to which programs are kept small


@triton.jit
def halves(x, weight, eps, cos, sin, place, real, NORM: tl.constexpr):
    """Both halves of normed, rotated rows, fp32 [tokens, heads, DIM / 2], from x + place."""
    half: tl.constexpr = cos.shape[2]
    a = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + place + half, mask=real, other=0.0).to(tl.float32)
    if NORM:
        i = tl.arange(0, half)[None, None, :]
        mean = (tl.sum(a * a, 2) + tl.sum(b * b, 2)) / (2 * half)
        one = (1.0 / tl.sqrt_rn(mean + eps))[:, :, None]
        a = a * one * tl.load(weight + i).to(tl.float32)
        b = b * one * tl.load(weight + half + i).to(tl.float32)
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
    place = k_pages + line[:, :, None] * (2 * half) + i
    if SCALES > 0:
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
        a, b = quantize(a, scale_a, TYPE), quantize(b, scale_b, TYPE)
    tl.store(place, a.to(TYPE), mask=written[:, None, None])
    tl.store(place + half, b.to(TYPE), mask=written[:, None, None])


@triton.jit
def values_of(
    token, head, v, slots, v_scale, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Where the values of tokens lie and go, and their scales, which are stored if they are new.

    Returns:
        (pointers to rows [tokens, 1], lines of 64 tokens to write to, places in them, which are
        written, scales), of each token.
    """
    slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
    written = slot >= 0
    slot = tl.where(written, slot, 0)
    rows = v + (token * pitch + head * DIM)[:, None]
    line, place = ((slot // 64) * HEADS + head) * 64, slot % 64
    scale = (token * 0).to(tl.float32)
    if SCALES == 3:
        x = tl.load(rows + tl.arange(0, DIM)[None, :], mask=written[:, None], other=0.0)
        absmax = tl.max(tl.abs(x.to(tl.float32)), 1)
        own = absmax_scale(absmax, TYPE).to(v_scale.dtype.element_ty)
        tl.store(v_scale + line + place, own, mask=written)
        scale += own.to(tl.float32)
    elif SCALES > 0:
        scale += tl.load(v_scale + head)
    return rows, line, place, written, scale


@triton.jit
def columns_of(rows, d, written, scale, SCALES: tl.constexpr, TYPE: tl.constexpr):
    """Channels d of tokens, quantized: [channels, tokens]."""
    x = tl.load(rows + d[None, :], mask=written[:, None], other=0.0).to(tl.float32)
    y = quantize(x, scale[:, None], TYPE) if SCALES > 0 else x.to(TYPE)
    return tl.trans(y)


@triton.jit
def run_at(slots, first, T):
    """Where in its page a run of 64 tokens from `first` on starts; -1 where they are no run."""
    i = tl.arange(0, 64)
    slot = tl.load(slots + first + i, mask=first + i < T, other=-1).to(tl.int64)
    start, last = tl.max(tl.where(i == 0, slot, -1), 0), tl.max(tl.where(i == 63, slot, -1), 0)
    place = start % 64 + i
    wanted = tl.where(place < 64, start // 64, last // 64) * 64 + place % 64
    strays = tl.sum((slot != wanted).to(tl.int32), 0)
    return tl.where((strays == 0) & (start >= 0) & (last >= 0), start % 64, -1).to(tl.int32)


@triton.jit
def write_run(
    v, v_pages, slots, v_scale, first, at, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Values of 64 tokens in a run that starts at place `at` of a page: whole pieces of 16.

    Some channels at a time: few registers leave an SM room for many programs.
    """
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    WIDTH: tl.constexpr = 32 if DIM > 32 else DIM
    j = tl.arange(0, 64)
    rows, _, _, written, scale = values_of(
        first + (j - at + 64) % 64, head, v, slots, v_scale, T, pitch, HEADS, DIM, SCALES, TYPE
    )
    page_a, page_b = tl.load(slots + first) // 64, tl.load(slots + first + 63) // 64
    head_a = v_pages + (page_a.to(tl.int64) * HEADS + head) * (64 * DIM)
    head_b = v_pages + (page_b.to(tl.int64) * HEADS + head) * (64 * DIM)
    piece = j // 16 * 16
    for part in range(DIM // WIDTH):
        d = part * WIDTH + tl.arange(0, WIDTH)
        columns = columns_of(rows, d, written, scale, SCALES, TYPE)
        inside = (d * 64)[:, None] + j[None, :]
        tl.store(head_a + inside, columns, mask=(piece >= at)[None, :])
        tl.store(head_b + inside, columns, mask=(piece + 16 <= at)[None, :])


@triton.jit
def write_values(
    v, v_pages, slots, v_scale, first, head, T, pitch,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Quantize a head's values of TOKENS tokens, 16 or 64, from `first` on; write columns."""
    TYPE: tl.constexpr = v_pages.dtype.element_ty
    begin, count = 0, 1  # of the groups of 16 tokens that go byte by byte
    if TOKENS == 64:
        at = run_at(slots, first, T)
        begin, count = at * 0, at * 0 + 4
        if at >= 0:
            write_run(v, v_pages, slots, v_scale, first, at, head, T, pitch, HEADS, DIM, SCALES)
            begin, count = 64 - at % 16, (at % 16 != 0).to(tl.int32)
    d = tl.arange(0, DIM)
    for group in range(count):
        token = first + (begin + group * 16 + tl.arange(0, 16)) % 64
        rows, line, place, written, scale = values_of(
            token, head, v, slots, v_scale, T, pitch, HEADS, DIM, SCALES, TYPE
        )
        columns = columns_of(rows, d, written, scale, SCALES, TYPE)
        cells = (line * DIM + place)[None, :] + (d * 64)[:, None]
        tl.store(v_pages + cells, columns, mask=written[None, :])


@triton.jit(do_not_specialize=["T"])
def rope_write_kernel(
    q, k, v, cos, sin, positions, q_norm, k_norm, eps, out, k_pages, v_pages, slots, k_scale,
    v_scale, T, q_pitch, k_pitch, v_pitch,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    PER: tl.constexpr, V_TOKENS: tl.constexpr, SCALES: tl.constexpr, TABLES: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """Programs (block of TOKENS tokens, PER heads of q or k), then (block of V_TOKENS, v head)."""
    if not SETTLED:
        wait(OVERLAP)
        announce(OVERLAP)
    GROUPS: tl.constexpr = (Q_HEADS + HEADS) // PER
    rotating = tl.cdiv(T, TOKENS) * GROUPS
    if tl.program_id(0) >= rotating:
        if SETTLED:
            wait(OVERLAP)
            announce(OVERLAP)
        block, head = (tl.program_id(0) - rotating) // HEADS, (tl.program_id(0) - rotating) % HEADS
        write_values(
            v, v_pages, slots, v_scale, (block * V_TOKENS).to(tl.int64), head, T, v_pitch,
            HEADS, DIM, V_TOKENS, SCALES,
        )  # fmt: skip
        return
    token = (tl.program_id(0) // GROUPS * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    start = tl.program_id(0) % GROUPS * PER
    head = start + tl.arange(0, PER)
    real = (token < T)[:, None, None]
    row = token
    if TABLES:
        row = tl.load(positions + token, mask=token < T, other=0).to(tl.int64)
    i = tl.arange(0, DIM // 2)[None, None, :]
    t, angle = token[:, None, None], row[:, None, None] * DIM + i
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
    if SETTLED:
        wait(OVERLAP)
        announce(OVERLAP)
    if start < Q_HEADS:
        h = head[None, :, None]
        a, b = halves(q, q_norm, eps, c, s, t * q_pitch + h * DIM + i, real, NORM)
        cells = out + (t * Q_HEADS + h) * DIM + i
        tl.store(cells, a.to(out.dtype.element_ty), mask=real)
        tl.store(cells + DIM // 2, b.to(out.dtype.element_ty), mask=real)
    else:
        own = head - Q_HEADS
        place = t * k_pitch + own[None, :, None] * DIM + i
        a, b = halves(k, k_norm, eps, c, s, place, real, NORM)
        written = slot >= 0
        slot = tl.where(written, slot, 0)
        write_keys(a, b, own, slot, written, k_pages, k_scale, HEADS, SCALES)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
    settled: bool = False,
) -> Tensor:
    """Norm and rotate q and k; put k and v into the cache.

    Args:
        q: Float [T, Hq, D]; rows may be parts of longer ones, as of a joint projection's result.
        k: [T, Hkv, D], likewise.
        v: [T, Hkv, D], likewise.
        cos: Float [P, D] of positions, the halves equal; of the tokens' own without `positions`.
        sin: [P, D], likewise.
        k_pages: int8, e4m3, bf16 or fp16 [pages, Hkv, 64, D], changed in place.
        v_pages: [pages, Hkv, D, 64], likewise.
        slots: int32 or int64 [T], page * 64 + offset, no two alike; negative where none is written.
        k_scale: fp32 [Hkv] or [Hkv, D]; or fp32 or fp16 [pages, Hkv, 64], changed in place; None
            for 16 bits.
        v_scale: fp32 [Hkv]; or [pages, Hkv, 64], changed in place; None for 16 bits.
        positions: int32 or int64 [T] below P; by default row t of `cos` and `sin` is token t's.
        q_norm: Float [D], weights of the norm of q's heads, with `k_norm`; None for no norm.
        k_norm: Float [D].
        eps: Added to the mean square.
        out_dtype: A float type, by default that of `q`; in fp16 attention over an 8-bit cache takes
            it as it is.
        settled: Whether `slots`, `positions`, `cos` and `sin` were there before the kernel ahead of
            this started: they are then read while it runs.

    Returns:
        Rotated q [T, Hq, D] in `out_dtype`, contiguous.

    Raises:
        ValueError: a shape or type does not fit.
    """
    (tokens, q_heads, dim), heads = q.shape, k_pages.shape[1]
    check_pages(k_pages, v_pages, k_scale, v_scale)
    for name, x, count in (("q", q, q_heads), ("k", k, heads), ("v", v, heads)):
        require(
            tuple(x.shape) == (tokens, count, k_pages.shape[3]) and x.stride()[1:] == (dim, 1),
            f"{name} is {tuple(x.shape)} with strides {x.stride()}; needed is "
            f"{(tokens, count, k_pages.shape[3])}, heads side by side",
        )
    rows = cos.shape[0] if positions is not None else tokens
    for name, x, shape in (
        ("cos", cos, (rows, dim)),
        ("sin", sin, (rows, dim)),
        ("slots", slots, (tokens,)),
        ("positions", slots if positions is None else positions, (tokens,)),
        ("q_norm", q_norm, (dim,)),
        ("k_norm", k_norm, (dim,)),
    ):
        require(
            x is None or (tuple(x.shape) == shape and x.is_contiguous()),
            f"{name} is {x is not None and tuple(x.shape)}; needed is contiguous {shape}",
        )
    require((q_norm is None) == (k_norm is None), "q_norm and k_norm come together")
    out = torch.empty((tokens, q_heads, dim), dtype=out_dtype or q.dtype, device=q.device)
    if tokens == 0:
        return out
    many = tokens > FEW
    per = math.gcd(8, math.gcd(q_heads, heads)) if many else 1
    block, v_block = (max(1, 4096 // (per * dim)), 64) if many else (16, 16)
    blocks, v_blocks = triton.cdiv(tokens, block), triton.cdiv(tokens, v_block)
    rope_write_kernel[(blocks * (q_heads + heads) // per + v_blocks * heads,)](
        q, k, v, cos, sin, positions, q_norm, k_norm, eps, out, k_pages, v_pages, slots, k_scale,
        v_scale, tokens, q.stride(0), k.stride(0), v.stride(0), Q_HEADS=q_heads, HEADS=heads,
        DIM=dim, TOKENS=block, PER=per, V_TOKENS=v_block, SCALES=scale_kind(k_scale),
        TABLES=positions is not None, NORM=q_norm is not None, num_warps=4, num_stages=1,
        enable_fp_fusion=False, SETTLED=settled, **overlap(tokens <= EARLY_ROWS),
    )  # fmt: skip
    return out
