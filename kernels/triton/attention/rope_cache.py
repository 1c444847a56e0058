"""Norm of heads, rotary embedding, quantization and the write to the paged cache, in one pass.

The first programs take a few tokens of a few heads of q or k: they norm them where weights are
given (RMSNorm of every head, as Qwen3 does), rotate them (Su et al. 2021, in the two-halves layout
of Llama checkpoints), turn them where the cache says so (`kernels.triton.attention.turn`), and
store q's rows, or quantize k, less its mean and with feedback where these are given, and store rows
of [pages, Hkv, 64, D], of int4 two channels a byte. Nothing is rounded in between. The other
programs quantize v and store columns of [pages, Hkv, D, 64], the layout that attention reads
(`kernels.triton.attention.paged_cache`).

Scales are those of a head ([Hkv]), of its channels ([Hkv, D], K alone), or are taken from each
token's head ([pages, Hkv, 64]: absmax / 127, or / 448 for e4m3; for int4 see
`kernels.packed_cache`) and written beside it; a cache of bf16 or fp16 has none.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_inputs import KVPool
from kernels.triton.attention.cache_write import write_keys, write_values
from kernels.triton.attention.paged_cache import (
    check_pages,
    head_size,
    load_channels,
    scale_kind,
)
from kernels.triton.attention.turn import turned
from kernels.triton.common import EARLY_ROWS, overlap, require, wait_and_announce

FEW = 256  # tokens up to which programs are kept small


@triton.jit
def halves(
    x, weight, eps, cos, sin, growth, place, real,
    DIM: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Both halves of normed, rotated rows, fp32 [tokens, heads, HALF], from x + place.

    They are multiplied by `growth` unless it is None, and turned where TURN says so. HALF is
    DIM / 2 rounded up to a power of two; there are zeros after each half.
    """
    half: tl.constexpr = DIM // 2
    WHOLE: tl.constexpr = cos.shape[2] == half
    a = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x + place + half, mask=real, other=0.0).to(tl.float32)
    if NORM:
        i = tl.arange(0, cos.shape[2])[None, None, :]
        mean = (tl.sum(a * a, 2) + tl.sum(b * b, 2)) / (2 * half)
        one = (1.0 / tl.sqrt_rn(mean + eps))[:, :, None]
        a = a * one * load_channels(weight + i, i < half, WHOLE).to(tl.float32)
        b = b * one * load_channels(weight + half + i, i < half, WHOLE).to(tl.float32)
    a, b = a * cos - b * sin, b * cos + a * sin
    if growth is not None:
        a, b = a * growth, b * growth
    if TURN > 1:
        a, b = turned(a, b, DIM, TURN)
    return a, b


@triton.jit(do_not_specialize=["T"])
def rope_write_kernel(
    q, k, v, cos, sin, positions, growth, q_norm, k_norm, eps, out, k_pages, v_pages, slots,
    k_scale, v_scale, k_offset, k_feedback, places, sink_k, sink_v, T, q_pitch, k_pitch, v_pitch,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, PER: tl.constexpr, V_TOKENS: tl.constexpr, SCALES: tl.constexpr,
    SINKS: tl.constexpr, TURN: tl.constexpr, TABLES: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr, METADATA_READY: tl.constexpr,
):  # fmt: skip
    """Programs (block of TOKENS tokens, PER heads of q or k), then (block of V_TOKENS, v head).

    WIDE is DIM rounded up to a power of two.
    """
    if not METADATA_READY:
        wait_and_announce(OVERLAP)
    GROUPS: tl.constexpr = (Q_HEADS + HEADS) // PER
    rotating = tl.cdiv(T, TOKENS) * GROUPS
    if tl.program_id(0) >= rotating:
        if METADATA_READY:
            wait_and_announce(OVERLAP)
        block, head = (tl.program_id(0) - rotating) // HEADS, (tl.program_id(0) - rotating) % HEADS
        write_values(
            v, v_pages, slots, v_scale, places, sink_v, (block * V_TOKENS).to(tl.int64), head, T,
            v_pitch, HEADS, DIM, WIDE, V_TOKENS, SCALES, SINKS,
        )  # fmt: skip
        return
    token = (tl.program_id(0) // GROUPS * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    start = tl.program_id(0) % GROUPS * PER
    head = start + tl.arange(0, PER)
    row, real = token, (token < T)[:, None, None]
    if TABLES:
        row = tl.load(positions + token, mask=token < T, other=0).to(tl.int64)
    i = tl.arange(0, WIDE // 2)[None, None, :]
    if WIDE != DIM:
        real = real & (i < DIM // 2)
    t, angle = token[:, None, None], row[:, None, None] * DIM + i
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    if growth is not None:
        growth = tl.load(growth + row, mask=token < T, other=1.0)[:, None, None]
    slot = tl.load(slots + token, mask=token < T, other=-1).to(tl.int64)
    if METADATA_READY:
        wait_and_announce(OVERLAP)
    if start < Q_HEADS:
        h = head[None, :, None]
        from_q = t * q_pitch + h * DIM + i
        a, b = halves(q, q_norm, eps, c, s, growth, from_q, real, DIM, NORM, TURN)
        cells = out + (t * Q_HEADS + h) * DIM + i
        tl.store(cells, a.to(out.dtype.element_ty), mask=real)
        tl.store(cells + DIM // 2, b.to(out.dtype.element_ty), mask=real)
    else:
        own = head - Q_HEADS
        from_k = t * k_pitch + own[None, :, None] * DIM + i
        a, b = halves(k, k_norm, eps, c, s, None, from_k, real, DIM, NORM, TURN)
        write_keys(
            a, b, own, token, slot, places, T, k_pages, k_scale, k_offset, k_feedback, sink_k,
            HEADS, DIM, SCALES, SINKS,
        )  # fmt: skip


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: KVPool,
    slots: Tensor,
    positions: Tensor | None = None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    growth: Tensor | None = None,
    places: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    metadata_ready: bool = False,
) -> Tensor:
    """Norm and rotate q and k; put k and v into the cache.

    Args:
        q: Float [T, Hq, D]; rows may be parts of longer ones, as of a joint projection's result.
        k: Float [T, Hkv, D], whose rows may be such parts too.
        v: Float [T, Hkv, D], whose rows may be such parts too.
        cos: Float [P, D] of positions, the halves equal; of the tokens' own without `positions`.
        sin: Float [P, D], laid out as `cos`.
        pool: As in `kernels.triton.attention.paged_cache`; pages, and scales of tokens, are changed
            in place.
        slots: int32 or int64 [T], page * 64 + offset, no two alike; negative where none is written.
        positions: int32 or int64 [T] below P; by default row t of `cos` and `sin` is token t's.
        q_norm: Float [D], weights of the norm of q's heads, with `k_norm`; None for no norm.
        k_norm: Float [D], weights of the norm of k's heads.
        eps: Added to the mean square.
        growth: fp32 [P], what rotated q is multiplied by at each position (Ministral 3); None for
            nothing.
        places: As `positions`: where tokens stand in their sequences, of which the first may be
            sinks; by default `positions`.
        out_dtype: A float type, by default that of `q`; in fp16 attention over an 8-bit cache takes
            it as it is.
        metadata_ready: Whether `slots`, `positions`, `cos` and `sin` were written before the kernel
            ahead of this started: they are then read while it runs.

    Returns:
        Rotated q [T, Hq, D], turned where `pool` says so, in `out_dtype`, contiguous.

    Raises:
        ValueError: a shape or type does not fit.
    """
    places = positions if places is None else places
    turning = cos, sin, positions, growth
    _check(q, k, v, turning, pool, slots, places, q_norm, k_norm)
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    if len(q):
        _launch(q, k, v, turning, pool, slots, places, q_norm, k_norm, eps, out, metadata_ready)
    return out


def _check(q, k, v, turning, pool, slots, places, q_norm, k_norm) -> None:
    """Raise ValueError where what `rope_write` takes does not fit."""
    (tokens, q_heads, dim), heads = q.shape, pool.k.shape[1]
    cos, sin, positions, growth = turning
    check_pages(pool)
    size = head_size(pool)
    for name, x, count in (("q", q, q_heads), ("k", k, heads), ("v", v, heads)):
        require(
            tuple(x.shape) == (tokens, count, size)
            and x.stride(2) == 1
            and (count == 1 or x.stride(1) == dim),
            f"{name} is {tuple(x.shape)} with strides {x.stride()}; needed is "
            f"{(tokens, count, size)}, heads side by side",
        )
    rows = (cos.shape[0] if positions is not None else tokens, dim)
    _check_shapes(rows, cos=cos, sin=sin)
    _check_shapes(rows[:1], growth=growth)
    _check_shapes((tokens,), slots=slots, positions=positions, places=places)
    require(places is not None or pool.sink_k is None, "a cache with sink tokens needs positions")
    _check_shapes((dim,), q_norm=q_norm, k_norm=k_norm)
    require((q_norm is None) == (k_norm is None), "q_norm and k_norm come together")


def _check_shapes(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raise ValueError where a tensor, if given, has another shape or is not contiguous."""
    for name, x in tensors.items():
        require(
            x is None or (tuple(x.shape) == shape and x.is_contiguous()),
            f"{name} is {x is not None and tuple(x.shape)}; needed is contiguous {shape}",
        )


def _launch(
    q, k, v, turning, pool, slots, places, q_norm, k_norm, eps, out, metadata_ready
) -> None:
    """Run the kernel on what `rope_write` has checked; many tokens take large programs."""
    (tokens, q_heads, dim), heads = q.shape, pool.k.shape[1]
    many, wide = tokens > FEW, triton.next_power_of_2(dim)
    per = math.gcd(8, math.gcd(q_heads, heads)) if many else 1
    block, v_block = (max(1, 4096 // (per * wide)), 64) if many else (16, 16)
    alone = pool.k_feedback is not None and not many  # a warp waits for no other between channels
    block = 1 if alone else block
    blocks, v_blocks = triton.cdiv(tokens, block), triton.cdiv(tokens, v_block)
    rope_write_kernel[(blocks * (q_heads + heads) // per + v_blocks * heads,)](
        q, k, v, *turning, q_norm, k_norm, eps, out, pool.k, pool.v, slots, pool.k_scale,
        pool.v_scale, pool.k_offset, pool.k_feedback, places, pool.sink_k, pool.sink_v, tokens,
        q.stride(0), k.stride(0), v.stride(0),
        Q_HEADS=q_heads, HEADS=heads, DIM=dim, WIDE=wide, TOKENS=block, PER=per, V_TOKENS=v_block,
        SCALES=scale_kind(pool), SINKS=pool.sink_tokens, TURN=pool.turn,
        TABLES=turning[2] is not None, NORM=q_norm is not None,
        METADATA_READY=metadata_ready, num_warps=1 if alone else 4, num_stages=1,
        enable_fp_fusion=False,
        **overlap(tokens <= EARLY_ROWS),
    )  # fmt: skip
