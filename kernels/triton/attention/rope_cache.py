"""Norm of heads, rotary embedding, quantization and the write to the paged cache, in one pass.

The first programs take a few tokens of a few heads of q or k: they norm them where weights are
given (RMSNorm of every head, as Qwen3 does), rotate them (Su et al. 2021, in the two-halves layout
of Llama checkpoints), turn them where the cache says so (`turned_halves`), and store q's rows, or
quantize k, less its mean and with feedback where these are given, and store rows of
[pages, Hkv, 64, D], of int4 two channels a byte. Nothing is rounded in between. The other programs
quantize v and store columns of [pages, Hkv, D, 64], the layout that attention reads
(`kernels.triton.attention.paged_cache`).

Scales are those of a head ([Hkv]), of its channels ([Hkv, D], K alone), or are taken from each
token's head ([pages, Hkv, 64]: absmax / 127, or / 448 for e4m3; for int4 see
`kernels.packed_cache`) and written beside it; a cache of bf16 or fp16 has none.

The turn before an int4 cache is `kernels.packed_cache.turned` on rows that come in halves, as
rotary embedding leaves them. A fast Walsh-Hadamard transform of n channels has steps of
1, 2, ..., n / 2, and both halves of a head are a whole number of n / 2: steps below that stay in a
half. The last pairs runs of n / 2, where a head is n channels its two halves.

Where q and k do not go on to the cache from here, `rotate` embeds their positions alone.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportMissingImports=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import KVPool
from kernels.triton.attention.cache_write import write_keys, write_values
from kernels.triton.attention.paged_cache import (
    check_pages,
    head_size,
    load_channels,
    scale_kind,
)
from kernels.triton.common import EARLY_ROWS, overlap, require, wait_and_announce


@triton.jit
def turned(a, b, DIM: tl.constexpr, N: tl.constexpr):
    """Both halves [tokens, heads, HALF] of heads of DIM channels, runs of N turned; 0: none.

    N is a power of two from 2 on, DIM a multiple of it; HALF is DIM / 2, up to a power of two.
    """
    STEPS: tl.constexpr = N.bit_length() - 2
    for step in tl.static_range(STEPS):
        a, b = _step(a, 1 << step), _step(b, 1 << step)
    if N == DIM:
        a, b = a + b, a - b
    else:
        a, b = _last(a, b, 0, DIM, N), _last(b, a, DIM // N, DIM, N)
    FACTOR: tl.constexpr = N**-0.5
    return a * FACTOR, b * FACTOR


@triton.jit
def _step(x, H: tl.constexpr):
    """Sums and differences of channels i and i + H in runs of 2 H."""
    T: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    first, second = tl.split(x.reshape(T, P, W // (2 * H), 2, H).permute(0, 1, 2, 4, 3))
    both = tl.join(first + second, first - second)
    return both.permute(0, 1, 2, 4, 3).reshape(T, P, W)


@triton.jit
def _last(own, other, FIRST: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr):
    """The step of N / 2 for a half that begins with run FIRST of the head's runs of N / 2."""
    M: tl.constexpr = N // 2
    RUNS: tl.constexpr = DIM // N  # of M, in a half: an odd number
    i = tl.arange(0, own.shape[2])
    run = FIRST + i // M
    paired = run ^ 1
    inside = (paired >= FIRST) & (paired < FIRST + RUNS)
    start = tl.where(paired >= RUNS, paired - RUNS, paired)
    place = (start * M + i % M) % own.shape[2]
    place = place[None, None, :] + tl.zeros_like(own).to(tl.int32)
    pair = tl.where(inside[None, None, :], tl.gather(own, place, 2), tl.gather(other, place, 2))
    y = tl.where((run % 2 == 0)[None, None, :], own + pair, pair - own)
    return tl.where((i < DIM // 2)[None, None, :], y, 0.0)


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
