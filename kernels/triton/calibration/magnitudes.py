"""The largest magnitudes and the histogram of activations, in one pass over them.

Maxima are of the bits of |x|, which are in the order of the numbers, NaN above all; they and counts
are integers, so the order in which programs add does not matter. Counts go into several copies of
the histogram, as many programs meet in its few full bins.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BINS = 1 << 15  # the exponents and mantissas of bf16
COPIES = 64  # of the histogram of an input; of K and V there are as many for all heads
TOKENS, CHANNELS, STEP = 256, 128, 32  # of a program, and tokens that it holds at once
MOST = 2**31 - 1  # values that 32 bits can count


@triton.jit
def _magnitudes_kernel(
    x, peaks, counts, tokens, channels, copies, token_pitch, head_pitch, pitch,
    COUNTED: tl.constexpr, BINS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(2), tl.num_programs(2)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.program_id(0) * TOKENS
    copy = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) % copies
    place = counts + (copy * heads + head).to(tl.int64) * BINS
    peak = tl.zeros([CHANNELS], tl.int32)
    zeros = 0
    for start in range(0, TOKENS, STEP):
        t = first + start + tl.arange(0, STEP)
        real = (t < tokens)[:, None] & (c < channels)
        at = t.to(tl.int64)[:, None] * token_pitch + head * head_pitch + c.to(tl.int64) * pitch
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        peak = tl.maximum(peak, tl.max(bits, axis=0))
        if COUNTED:
            bins = bits >> 16
            zeros += tl.sum(tl.sum((real & (bins == 0)).to(tl.int32), axis=1), axis=0)
            tl.atomic_add(place + bins, 1, mask=real & (bins > 0), sem="relaxed")
    tl.atomic_max(peaks + head * channels + c, peak, mask=c < channels, sem="relaxed")
    if COUNTED:
        tl.atomic_add(place, zeros, sem="relaxed")


class Magnitudes:
    """Gathers what samples show of one tensor on a GPU.

    Args:
        heads: Kept apart; 1 for the input of a linear layer.
        channels: Of a head.
        histogram: Whether to count magnitudes.
    """

    def __init__(self, heads: int, channels: int, device: torch.device, *, histogram: bool) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._copies = max(1, COPIES // heads)
        self._histogram = histogram
        self._peaks = zeros(heads, channels)
        self._counts = zeros(*((self._copies, heads, BINS) if histogram else (1,)))
        self._total = zeros(*((heads, BINS) if histogram else (1,)), dtype=torch.int64)
        self._since = 0

    def add(self, x: Tensor) -> None:
        """Add the tokens [T, heads, channels] of one sample, float, of any strides."""
        tokens, heads, channels = x.shape
        if self._since + x.numel() > MOST:
            self._flush()
        grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS), heads)
        _magnitudes_kernel[grid](
            x, self._peaks, self._counts, tokens, channels, self._copies, *x.stride(),
            COUNTED=self._histogram, BINS=BINS,
            TOKENS=TOKENS, CHANNELS=CHANNELS, STEP=STEP, num_warps=4,
        )  # fmt: skip
        self._since += x.numel()

    def channel_absmax(self) -> Tensor:
        """Largest magnitude of each channel: fp32 [heads, channels]; NaN where one was met."""
        return self._peaks.view(torch.float32)

    def counts(self) -> Tensor | None:
        """Values in each bin of each head: int64 [heads * BINS]; None where none are counted."""
        self._flush()
        return self._total.flatten() if self._histogram else None

    def _flush(self) -> None:
        if self._histogram:
            self._total += self._counts.sum(dim=0)
            self._counts.zero_()
        self._since = 0
