"""What latent attention caches of new tokens, and the rotated part of their queries, in one pass.

A token's first program norms the latent (RMSNorm), rotates the key part after it (Su et al. 2021,
two-halves layout), quantizes both with static scales of their channels, and writes them to pages of
`kernels.triton.attention.latent`; its second rotates the queries of all heads. Nothing is rounded
in between.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import KVPool
from kernels.triton.attention.latent import check_latents
from kernels.triton.common import EARLY_ROWS, overlap, quantize, require, wait_and_announce


@triton.jit
def latent_write_kernel(
    q, cached, cos, sin, positions, norm, eps, out, keys, latents, slots, key_scale, latent_scale,
    q_pitch, pitch,
    HEADS: tl.constexpr, PADDED: tl.constexpr, PLAIN: tl.constexpr, TURN: tl.constexpr,
    HALF: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs (token, 0 for what is cached and 1 for the queries); HALF is TURN / 2, padded."""
    wait_and_announce(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF)
    turning = i < TURN // 2
    angle = tl.load(positions + token).to(tl.int64) * TURN + i
    c = tl.load(cos + angle, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turning, other=0.0).to(tl.float32)
    if tl.program_id(1) == 1:
        h = tl.arange(0, PADDED)
        real = (h < HEADS)[:, None] & turning[None, :]
        place = q + token * q_pitch + h[:, None] * (PLAIN + TURN) + PLAIN + i[None, :]
        a = tl.load(place, mask=real, other=0.0).to(tl.float32)
        b = tl.load(place + TURN // 2, mask=real, other=0.0).to(tl.float32)
        cells = out + (token * HEADS + h[:, None]) * TURN + i[None, :]
        kind = out.dtype.element_ty
        tl.store(cells, (a * c[None, :] - b * s[None, :]).to(kind), mask=real)
        tl.store(cells + TURN // 2, (b * c[None, :] + a * s[None, :]).to(kind), mask=real)
        return
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    TYPE: tl.constexpr = latents.dtype.element_ty
    d = tl.arange(0, WIDE)
    inside = d < RANK
    x = tl.load(cached + token * pitch + d, mask=inside, other=0.0).to(tl.float32)
    one = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / RANK + eps)
    x = x * one * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(cached + token * pitch + RANK + i, mask=turning, other=0.0).to(tl.float32)
    b = tl.load(cached + token * pitch + RANK + TURN // 2 + i, mask=turning, other=0.0)
    b = b.to(tl.float32)
    a, b = a * c - b * s, b * c + a * s
    if SCALED:
        x = quantize(x, tl.load(latent_scale + d, mask=inside, other=1.0), TYPE)
        a = quantize(a, tl.load(key_scale + i, mask=turning, other=1.0), TYPE)
        b = quantize(b, tl.load(key_scale + TURN // 2 + i, mask=turning, other=1.0), TYPE)
    tl.store(latents + slot * RANK + d, x.to(TYPE), mask=inside)
    tl.store(keys + slot * TURN + i, a.to(TYPE), mask=turning)
    tl.store(keys + slot * TURN + TURN // 2 + i, b.to(TYPE), mask=turning)


def latent_write(
    q: Tensor,
    cached: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    pool: KVPool,
    slots: Tensor,
) -> Tensor:
    """Put latents and rotated keys of new tokens into the cache; rotate their queries.

    Args:
        q: Float [T, Hq, plain + P], of which the last P channels turn; rows may be parts of longer
            ones.
        cached: Float [T, R + P], the latent before its norm and the key part that turns; rows may
            be parts of longer ones.
        norm: Float [R], weight of the latent's norm.
        eps: Added to its mean square.
        cos: fp32 [positions, P], the halves equal.
        sin: fp32 [positions, P], laid out as `cos`.
        positions: int64 [T].
        pool: As in `kernels.triton.attention.latent`; its pages are changed in place.
        slots: int64 [T], page * 64 + offset, no two alike; negative where none is written.

    Returns:
        The rotated part of the queries, [T, Hq, P] in the type of `q`, contiguous.

    Raises:
        ValueError: a shape or type does not fit.
    """
    _check(q, cached, norm, cos, sin, positions, pool, slots)
    rank, turn = pool.v.shape[3], pool.k.shape[3]
    tokens, heads, size = q.shape
    out = torch.empty((tokens, heads, turn), dtype=q.dtype, device=q.device)
    if tokens:
        latent_write_kernel[(tokens, 2)](
            q, cached, cos, sin, positions, norm, eps, out, pool.k, pool.v, slots, pool.k_scale,
            pool.v_scale, q.stride(0), cached.stride(0), HEADS=heads,
            PADDED=triton.next_power_of_2(heads), PLAIN=size - turn, TURN=turn,
            HALF=triton.next_power_of_2(turn // 2), RANK=rank, WIDE=triton.next_power_of_2(rank),
            SCALED=pool.v_scale is not None, num_warps=4, num_stages=1, enable_fp_fusion=False,
            **overlap(tokens <= EARLY_ROWS),
        )  # fmt: skip
    return out


def _check(q, cached, norm, cos, sin, positions, pool, slots) -> None:
    """Raise ValueError where what `latent_write` takes does not fit."""
    check_latents(pool)
    rank, turn = pool.v.shape[3], pool.k.shape[3]
    tokens, _, size = q.shape
    require(
        q.stride()[1:] == (size, 1) and cached.stride(1) == 1,
        f"q has strides {q.stride()}, cached {cached.stride()}; needed are whole rows",
    )
    require(
        tuple(cached.shape) == (tokens, rank + turn) and tuple(norm.shape) == (rank,),
        f"cached is {tuple(cached.shape)}, its norm {tuple(norm.shape)}; needed are "
        f"{(tokens, rank + turn)} and {(rank,)}",
    )
    require(
        cos.shape[1] == turn and cos.shape == sin.shape and cos.is_contiguous(),
        f"cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}; needed are [positions, {turn}]",
    )
    require(
        positions.shape == slots.shape == (tokens,),
        f"{len(positions)} positions and {len(slots)} slots for {tokens} tokens",
    )
