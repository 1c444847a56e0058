"""Clipping ranges of activations, chosen from what was seen of them.

Each way of choosing reads the statistics of a tensor alone (`calibrate.tensor_statistics`): ranges
can be chosen again without running the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calibrate.spec import ObserverSpec
from calibrate.tensor_statistics import TensorStatistics, bin_edge
from kernels.numerics import INT8, QuantizedType

POINTS = 8  # sub-samples of a bin when an error is estimated from the histogram


def choose_absmax(
    stats: TensorStatistics, spec: ObserverSpec, dtype: QuantizedType = INT8
) -> float:
    """Clipping magnitude of a tensor (of one head, for `stats.head(i)`)."""
    if spec.method == "absmax" or stats.absmax == 0:
        return stats.absmax
    if spec.method == "averaged_absmax":
        return averaged_absmax(stats)
    if not stats.counted:
        raise ValueError(f"{spec.method} needs a histogram, and only maxima were observed")
    if spec.method == "percentile":
        return percentile(stats, spec.percentile)
    return mse(stats, dtype) if spec.method == "mse" else entropy(stats, dtype)


def averaged_absmax(stats: TensorStatistics) -> float:
    """Mean of the samples' largest magnitudes: what one loud sample shows counts for little."""
    if not len(stats.sample_absmax):
        raise ValueError("averaged_absmax needs maxima by sample, and there are none")
    peaks = stats.sample_absmax.amax(dim=1).double()
    return math.fsum(peaks.tolist()) / len(peaks)


def percentile(stats: TensorStatistics, share: float) -> float:
    """Upper edge of the bin up to which at least `share` per cent of the magnitudes lie."""
    edges, counts = stats.histogram()
    cumulative = counts.cumsum(0)
    reached = int(torch.searchsorted(cumulative, cumulative[-1] * share / 100).item())
    reached = min(reached, len(edges) - 1)
    return min(_upper(edges[reached]).item(), stats.absmax)


def mse(stats: TensorStatistics, dtype: QuantizedType = INT8) -> float:
    """Range of least squared error.

    Searched in steps of 2^(1/4) down to 2^-16 of the largest magnitude (a lone outlier can be that
    far from all else), then in steps of 2^(1/32) around the best of these.
    """
    values, weights = _sampled(stats)

    def error(octaves: float) -> float:
        scale = stats.absmax * 2.0**-octaves / dtype.top
        return _squared_error(values, weights, scale, dtype)

    coarse = min((step / 4 for step in range(65)), key=error)
    near = (coarse + step / 32 for step in range(-8, 9))
    return stats.absmax * 2.0 ** -min((octaves for octaves in near if octaves >= 0), key=error)


def entropy(stats: TensorStatistics, dtype: QuantizedType = INT8, cells: int = 2048) -> float:
    """Range of least KL divergence (Migacz, "8-bit Inference with TensorRT", GTC 2017).

    The magnitudes are put into 2048 equal cells. For each range of i cells, P is the distribution
    with all beyond the range in its last cell, Q is the same (without what is beyond) after
    merging to 128 levels and spreading each level over its occupied cells; the i with the least
    KL(P, Q) wins. No range is below 1/16 of the largest magnitude: i starts at 128.
    """
    values, weights = _sampled(stats)
    cell = (values / stats.absmax * cells).long().clamp(max=cells - 1)
    mass = torch.zeros(cells, dtype=torch.float64).scatter_add_(0, cell, weights)
    levels = 128 if dtype.storage.is_floating_point else dtype.q_max + 1
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
    """Share of the values in bins from `absmax` on; exactly 0 at the largest value."""
    if absmax >= stats.absmax:
        return 0.0
    edges, counts = stats.histogram()
    return (counts[edges >= absmax].sum() / counts.sum()).item()


def _sampled(stats: TensorStatistics) -> tuple[Tensor, Tensor]:
    """The histogram as points with weights, `POINTS` spread over each bin."""
    edges, counts = stats.histogram()
    inside = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    values = edges[:, None] + (_upper(edges) - edges)[:, None] * inside
    return values.flatten().clamp(max=stats.absmax), (counts / POINTS).repeat_interleave(POINTS)


def _squared_error(values: Tensor, weights: Tensor, scale: float, dtype: QuantizedType) -> float:
    steps = (values / scale).clamp(max=dtype.q_max)
    if dtype.storage.is_floating_point:
        quantized = steps.float().to(dtype.storage).double() * scale
    else:
        quantized = steps.round() * scale
    return (weights * (values - quantized).square()).sum().item()


def _upper(edges: Tensor) -> Tensor:
    """Upper edges of the bins with these lower ones: the next bf16 numbers."""
    return bin_edge((edges.float().view(torch.int32) >> 16) + 1)
