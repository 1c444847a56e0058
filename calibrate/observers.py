"""Statistics of activations, exact and mergeable, and the ranges that are chosen from them.

What is kept of a tensor is its largest magnitudes, by channel, and a histogram of |x| over the
32,768 values of bf16's exponent and mantissa: an integer count for each, with nothing to configure
and no range to guess. Maxima and integer sums do not depend on batch size, order or number of
ranks, so neither does anything derived from them. A bin is at most 2^-7 wide relative to its value.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from formats.errors import RecipeError
from formats.scheme import Strict
from kernels.numerics import INT8, QuantizedType

BINS = 1 << 15
POINTS = 8  # sub-samples of a bin when an error is estimated from the histogram


class ObserverSpec(Strict):
    """How a clipping range is chosen from what was observed.

    YAML: ``input: {method: percentile, percentile: 99.99}``

    `absmax` clips nothing; `percentile` keeps that share of the values; `mse` minimizes the squared
    error; `entropy` minimizes the KL divergence between the values and what int8 makes of them.
    """

    method: Literal["absmax", "percentile", "mse", "entropy"] = "absmax"
    percentile: float = Field(default=99.99, gt=50, le=100)


class TensorStatistics:
    """What was seen of one tensor.

    Attributes:
        tokens: Tokens seen.
        channel_absmax: Largest magnitude of each channel: fp32 [K], or [H, D] for cached heads.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start with nothing seen of tokens of `shape`: (K,) for an input, (H, D) for heads."""
        self.tokens = 0
        self.channel_absmax = torch.zeros(shape)
        self._bins = torch.empty(0, dtype=torch.int64)  # head * BINS + bin, sorted
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def heads(self) -> int:
        """Heads that are kept apart; 1 for the input of a linear layer."""
        return self.channel_absmax.shape[0] if self.channel_absmax.dim() == 2 else 1

    @property
    def absmax(self) -> float:
        """Largest magnitude, exact."""
        return self.channel_absmax.max().item()

    def observe(self, x: Tensor, name: str = "activations", *, histogram: bool = True) -> None:
        """Add tokens.

        Args:
            x: [T, K] or [T, H, D], float.
            name: Module, for the error's text.
            histogram: Whether to count magnitudes; the largest ones alone take a third of the time.

        Raises:
            RecipeError: `x` holds NaN or infinity.
        """
        if x.shape[0] == 0:
            return
        magnitude = x.detach().float().abs()
        peak = magnitude.amax(dim=0)
        if not bool(torch.isfinite(peak).all()):
            raise RecipeError(
                f"{name}: its activations hold NaN or infinity. Check the model's weights, and "
                "that it runs in float on this data"
            )
        if not histogram:
            self._add_maxima(x.shape[0], peak)
            return
        bins = magnitude.contiguous().view(torch.int32) >> 16
        if self.heads > 1:
            bins = bins + (torch.arange(self.heads, dtype=torch.int32) * BINS)[:, None]
        counts = torch.bincount(bins.flatten(), minlength=self.heads * BINS)
        self._add(x.shape[0], peak, counts)

    def merge(self, other: TensorStatistics) -> None:
        """Add what another has seen of the same tensor."""
        if other.channel_absmax.shape != self.channel_absmax.shape:
            raise ValueError(
                f"cannot merge statistics of shapes {tuple(other.channel_absmax.shape)} and "
                f"{tuple(self.channel_absmax.shape)}"
            )
        self._add(other.tokens, other.channel_absmax, other._dense())

    def head(self, index: int) -> TensorStatistics:
        """Statistics of one head alone, with `channel_absmax` [D]."""
        part = TensorStatistics(tuple(self.channel_absmax.shape[-1:]))
        part._add(self.tokens, self.channel_absmax[index], self._dense().view(-1, BINS)[index])
        return part

    def histogram(self) -> tuple[Tensor, Tensor]:
        """Occupied bins, all heads together: (lower edges fp64, counts fp64), ascending."""
        counts = self._dense().view(self.heads, BINS).sum(dim=0)
        bins = counts.nonzero().flatten()
        return bin_edge(bins), counts[bins].double()

    def state(self) -> dict[str, Tensor]:
        """Tensors to save; `from_state` restores them."""
        return {
            "channel_absmax": self.channel_absmax,
            "bins": self._bins.to(torch.int32),
            "counts": self._counts,
            "tokens": torch.tensor([self.tokens]),
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> TensorStatistics:
        """Inverse of `state`."""
        restored = cls(tuple(state["channel_absmax"].shape))
        restored.tokens = int(state["tokens"].item())
        restored.channel_absmax = state["channel_absmax"]
        restored._bins, restored._counts = state["bins"].long(), state["counts"]
        return restored

    def __eq__(self, other: object) -> bool:
        """Whether both saw the same, bit for bit."""
        if not isinstance(other, TensorStatistics):
            return NotImplemented
        a, b = self.state(), other.state()
        return all(torch.equal(a[key], b[key]) for key in a)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # mutable

    def _dense(self) -> Tensor:
        dense = torch.zeros(self.heads * BINS, dtype=torch.int64)
        dense[self._bins] = self._counts
        return dense

    def _add(self, tokens: int, channel_absmax: Tensor, counts: Tensor) -> None:
        counts = counts + self._dense()
        self._bins = counts.nonzero().flatten()
        self._counts = counts[self._bins]
        self._add_maxima(tokens, channel_absmax)

    def _add_maxima(self, tokens: int, channel_absmax: Tensor) -> None:
        self.channel_absmax = torch.maximum(self.channel_absmax, channel_absmax)
        self.tokens += tokens


def bin_edge(bins: Tensor) -> Tensor:
    """Lower edge of histogram bins: the bf16 number whose bits are the bin's index, in fp64."""
    return (bins.to(torch.int32) << 16).view(torch.float32).double()


def choose_absmax(stats: TensorStatistics, spec: ObserverSpec) -> float:
    """Clipping magnitude of a tensor (of one head, for `stats.head(i)`)."""
    if spec.method == "absmax" or stats.absmax == 0:
        return stats.absmax
    if spec.method == "percentile":
        return percentile(stats, spec.percentile)
    return mse(stats) if spec.method == "mse" else entropy(stats)


def percentile(stats: TensorStatistics, share: float) -> float:
    """Upper edge of the bin up to which at least `share` per cent of the magnitudes lie."""
    edges, counts = stats.histogram()
    cumulative = counts.cumsum(0)
    reached = int(torch.searchsorted(cumulative, cumulative[-1] * share / 100).item())
    reached = min(reached, len(edges) - 1)
    width = edges[reached] * 2**-7
    return min((edges[reached] + width).item(), stats.absmax)


def mse(stats: TensorStatistics, dtype: QuantizedType = INT8) -> float:
    """Range of least squared error, of 1.00, 0.99, ... 0.20 of the largest magnitude."""
    values, weights = _sampled(stats)
    best, least = stats.absmax, math.inf
    for hundredths in range(100, 19, -1):
        absmax = stats.absmax * hundredths / 100
        error = _squared_error(values, weights, absmax / dtype.q_max, dtype)
        if error < least:
            best, least = absmax, error
    return best


def entropy(stats: TensorStatistics, dtype: QuantizedType = INT8, cells: int = 2048) -> float:
    """Range of least KL divergence (Migacz, "8-bit Inference with TensorRT", GTC 2017).

    The magnitudes are put into 2048 equal cells. For each range of i cells, P is the distribution
    with all beyond the range in its last cell, Q is the same (without what lies beyond) after
    merging to 128 levels and spreading each level over its occupied cells; the i with the least
    KL(P, Q) wins.
    """
    values, weights = _sampled(stats)
    cell = (values / stats.absmax * cells).long().clamp(max=cells - 1)
    mass = torch.zeros(cells, dtype=torch.float64).scatter_add_(0, cell, weights)
    levels = dtype.q_max + 1
    best, least = cells, math.inf
    for i in range(levels, cells + 1, 8):
        inside = mass[:i]
        p = inside.clone()
        p[-1] += mass[i:].sum()
        level = torch.arange(i) * levels // i
        occupied = (inside > 0).double()
        total = torch.zeros(levels, dtype=torch.float64).scatter_add_(0, level, inside)
        count = torch.zeros(levels, dtype=torch.float64).scatter_add_(0, level, occupied)
        q = (total / count.clamp(min=1))[level] * occupied
        p, q = p / p.sum(), q / q.sum().clamp(min=1e-300)
        seen = p > 0
        divergence = (p[seen] * (p[seen] / q[seen].clamp(min=1e-12)).log()).sum().item()
        if divergence < least:
            best, least = i, divergence
    return stats.absmax * best / cells


def clip_fraction(stats: TensorStatistics, absmax: float) -> float:
    """Share of the values whose bin lies wholly beyond `absmax`; exactly 0 at the largest value."""
    edges, counts = stats.histogram()
    if len(edges) == 0:
        return 0.0
    return (counts[edges > absmax].sum() / counts.sum()).item()


def estimated_sqnr_db(
    stats: TensorStatistics, scale: float, dtype: QuantizedType = INT8
) -> float | None:
    """Signal-to-quantization-noise ratio in dB of quantizing with `scale`; None if lossless."""
    values, weights = _sampled(stats)
    noise = _squared_error(values, weights, scale, dtype)
    signal = (weights * values.square()).sum().item()
    if noise == 0 or signal == 0:
        return None
    return 10 * math.log10(signal / noise)


def _sampled(stats: TensorStatistics) -> tuple[Tensor, Tensor]:
    """The histogram as points with weights, `POINTS` spread over each bin."""
    edges, counts = stats.histogram()
    inside = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS * 2**-7
    values = edges[:, None] * (1 + inside)
    return values.flatten().clamp(max=stats.absmax), (counts / POINTS).repeat_interleave(POINTS)


def _squared_error(values: Tensor, weights: Tensor, scale: float, dtype: QuantizedType) -> float:
    quantized = (values / scale).round().clamp(max=dtype.q_max) * scale
    return (weights * (values - quantized).square()).sum().item()
