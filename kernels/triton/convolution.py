"""Short convolutions before the recurrences of layers that keep a state.

Each channel's last few inputs are multiplied by its weights and added up.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require
from kernels.triton.fused import activate
from kernels.triton.recurrence import place_of

TOKENS, BLOCK = 16, 128  # of a program: tokens, channels


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(
    x, weight, bias, out, T, CHANNELS, x_sequence, x_channel, x_token,
    TAPS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tokens, channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    x += sequence * x_sequence + c.to(tl.int64)[None, :] * x_channel
    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        w = tl.load(weight + c * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        at = t - (TAPS - 1) + tap
        there = real[None, :] & (at >= 0)[:, None] & (t < T)[:, None]
        own = tl.load(x + at.to(tl.int64)[:, None] * x_token, mask=there, other=0.0)
        acc += own.to(tl.float32) * w[None, :]
    place = out + (sequence * T + t[:, None]) * CHANNELS + c[None, :]
    y = (activate(acc, "silu") if SILU else acc).to(out.dtype.element_ty)
    tl.store(place, y, mask=real[None, :] & (t < T)[:, None])


@triton.jit
def next_kernel(
    x, state, places, count, weight, bias, out, CHANNELS, x_sequence, x_channel,
    TAPS: tl.constexpr, KEPT: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence, channels)."""
    sequence, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    own = tl.load(x + sequence * x_sequence + c.to(tl.int64) * x_channel, mask=real, other=0.0)
    state += (place_of(sequence, places, count) * CHANNELS + c) * KEPT
    acc = tl.zeros([WIDTH], tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    for i in tl.static_range(KEPT + 1):
        if i < KEPT:
            value = tl.load(state + i, mask=real, other=0.0).to(tl.float32)
        else:
            value = own.to(tl.float32)
        if i >= KEPT + 1 - TAPS:
            tap = weight + c * TAPS + i - (KEPT + 1 - TAPS)
            acc += value * tl.load(tap, mask=real, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(state + i - 1, value.to(state.dtype.element_ty), mask=real)
    y = (activate(acc, "silu") if SILU else acc).to(out.dtype.element_ty)
    tl.store(out + sequence * CHANNELS + c, y, mask=real)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, state: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each channel's sum over its last inputs.

    Args:
        x: Float [B, C, T], zeros before it; with a state [B, C, 1].
        weight: Float [C, taps], the newest input's last.
        bias: Float [C] or None.
        silu: Whether what is returned is silu of the sum.
        state: Float [B, C, S], contiguous, S >= taps - 1: the inputs before x; changed in place to
            end with x. None: there are none.
        places: As of `linear_recurrence`.

    Returns:
        Like x; channels are next to each other in memory.

    Raises:
        ValueError: a shape does not fit.
    """
    (batch, channels, tokens), taps = x.shape, weight.shape[1]
    weight = weight.contiguous()
    require(len(weight) == channels, f"{len(weight)} channels' weights for {channels} channels")
    out = torch.empty((batch, tokens, channels), dtype=x.dtype, device=x.device)
    if state is None:
        grid = (batch, triton.cdiv(tokens, TOKENS), triton.cdiv(channels, BLOCK))
        convolve_kernel[grid](
            x, weight, bias, out, tokens, channels, *x.stride(), TAPS=taps, SILU=silu,
            WIDTH=BLOCK, TOKENS=TOKENS,
        )  # fmt: skip
        return out.mT
    kept = state.shape[-1]
    require(
        tokens == 1 and state.is_contiguous() and state.shape[1] == channels
        and len(state if places is None else places) == batch and kept >= taps - 1,
        f"x {tuple(x.shape)} after a state {tuple(state.shape)}; needed are [B, C, 1] and a "
        f"contiguous [B, C, {taps - 1} or more]",
    )  # fmt: skip
    next_kernel[(batch, triton.cdiv(channels, BLOCK))](
        x, state, places, len(state), weight, bias, out, channels, *x.stride()[:2], TAPS=taps,
        KEPT=kept, SILU=silu, WIDTH=BLOCK,
    )  # fmt: skip
    return out.mT
