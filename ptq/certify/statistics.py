"""Tests and intervals of paired figures; each is named in the certificate as it is here.

    McNemar, exact   of yes and no: with b cases that only the original has and c that only the
                     quantized model has, P(Binomial(b + c, 1/2) >= b) (McNemar 1947; exact form)
    sign-flip        of means: under no loss beyond the limit, each case's loss less the limit is as
                     likely positive as negative (Fisher 1935, section 21); one-sided
    bootstrap        of quantiles: cases are drawn anew (Efron and Tibshirani 1993, chapter 13)

P values are corrected by Holm (1979). All random numbers are of fixed seeds: equal rows give equal
digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]
EXACT = 14  # cases up to which all flips are tried
FLIPS, DRAWS = 20000, 4000
SEED = 1729
PER_DECADE = 20  # bins of a histogram of KL
FIRST, BINS = -7, 200  # from 1e-7, below which is 0, to 1e3 nats


def sign_flip(losses: Floats, limit: float = 0.0) -> float:
    """P value of a mean loss beyond a limit.

    Args:
        losses: One a case [n].
    """
    own = losses - limit
    if not len(own) or own.mean() <= 0:
        return 1.0
    n = len(own)
    if n <= EXACT:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((signs @ own >= own.sum() * (1 - 1e-12)).mean())
    above = (_flips(n) @ own >= own.sum() * (1 - 1e-12)).sum()
    return float(1 + above) / (1 + FLIPS)


@cache
def _flips(cases: int) -> Floats:
    """Signs [FLIPS, cases]."""
    draw = np.random.default_rng(SEED)
    return draw.choice(np.array([-1.0, 1.0]), (FLIPS, cases))


def mean_interval(losses: Floats) -> Interval | None:
    """95% interval of a mean: percentiles of cases drawn anew; None of fewer than two cases."""
    if len(losses) < 2:
        return None
    low, high = np.quantile(_weights(len(losses)) @ losses, [0.025, 0.975])
    return float(low), float(high)


def mcnemar(original: Floats, quantized: Floats) -> float:
    """P value of yes and no: that the quantized model has fewer of what is wanted (1) [n] each."""
    lost = int(((original == 1) & (quantized == 0)).sum())
    won = int(((original == 0) & (quantized == 1)).sum())
    return sum(math.comb(lost + won, k) for k in range(lost, lost + won + 1)) / 2 ** (lost + won)


def share_interval(original: Floats, quantized: Floats) -> Interval:
    """95% interval of a difference of paired shares, quantized less original.

    Bonett and Price (2012): Wald's, of a table to which one case of each kind of flip is added.
    """
    n = len(original) + 2
    lost = (((original == 1) & (quantized == 0)).sum() + 1) / n
    won = (((original == 0) & (quantized == 1)).sum() + 1) / n
    half = 1.96 * math.sqrt((lost + won - (won - lost) ** 2) / n)
    return max(-1.0, float(won - lost - half)), min(1.0, float(won - lost + half))


def histogram(values: Floats) -> dict[int, int]:
    """How many values fall into each bin of equal width in the logarithm."""
    bins = np.floor((np.log10(np.maximum(values, 1e-30)) - FIRST) * PER_DECADE)
    own, counts = np.unique(np.clip(bins, 0, BINS - 1).astype(int), return_counts=True)
    return dict(zip(own.tolist(), counts.tolist(), strict=True))


def quantile(histograms: Sequence[dict[int, int]], share: float) -> tuple[float, Floats]:
    """A quantile of all values, and of those of cases drawn anew [DRAWS].

    Args:
        histograms: One a case, of `histogram`.
        share: Such as 0.99.
    """
    counts = np.zeros((len(histograms), BINS))
    for row, own in zip(counts, histograms, strict=True):
        row[list(own)] = list(own.values())
    found = _quantiles(counts.sum(0)[None], share)[0]
    return float(found), _quantiles(_weights(len(counts)) @ counts, share)


def _quantiles(counts: Floats, share: float) -> Floats:
    """Of each row of counts, the value below which a share is; even within a bin."""
    sums = counts.cumsum(1)
    wanted = share * sums[:, -1:]
    bins = (sums < wanted).sum(1)
    rows = np.arange(len(counts))
    before = sums[rows, bins] - counts[rows, bins]
    part = (wanted[:, 0] - before) / np.maximum(counts[rows, bins], 1e-30)
    return np.where(bins == 0, 0.0, 10 ** (FIRST + (bins + part) / PER_DECADE))


@cache
def _weights(cases: int) -> Floats:
    """How often each case was drawn, over how many there are [DRAWS, cases]."""
    draw = np.random.default_rng(SEED)
    return draw.multinomial(cases, np.full(cases, 1 / cases), DRAWS) / cases


def holm(values: Sequence[float]) -> list[float]:
    """P values corrected for their number, so that one wrong red in all has a chance below 5%."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, most = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = most
    return corrected
