"""Figures of tasks, and what is left of them after quantization.

An item's figure is 1 where the model is right, else 0. Recovery is the quantized model's mean over
the original's. As both answer the same items, its interval is a paired one: items are drawn again
with replacement, each with both figures (the percentile bootstrap, as in `inference.accuracy`).
Flips are items on which one model is right and the other is not: two models of equal accuracy may
differ in many (Dutta et al. 2024, "Accuracy is Not All You Need", arXiv 2407.09141).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from formats.scheme import Strict

RESAMPLES = 4000
HEADER = ("task", "metric", "items", "value")
AGAINST = ("original", "recovery", "flips")


class Metric(Strict):
    """A figure of a task.

    Attributes:
        name: The metric's, as lm-eval calls it.
        value: Of all items.
        stderr: Its standard error; None where lm-eval gives none.
        each: By the number of an item, 1 where the model is right and 0 where it is not; empty for
            metrics that are not shares of right answers.
    """

    task: str
    name: str
    value: float
    stderr: float | None
    higher_is_better: bool
    items: int
    each: dict[int, float]


class Recovery(Strict):
    """What is left of a figure after quantization.

    Attributes:
        ratio: The quantized model's over the original's, or the reverse where less is better, so
            that less than 1 is a loss; None where that divides by 0.
        interval: 95%, of paired items; None where items have no figures of their own.
        lost: Items on which the original was right and the quantized model is not.
        won: Items of which the reverse holds.
    """

    ratio: float | None
    interval: tuple[float, float] | None
    lost: int
    won: int


class TaskRow(Strict):
    """A figure of a task, of the original and of the quantized model."""

    original: Metric
    quantized: Metric
    recovery: Recovery


def recovery(quantized: Metric, original: Metric) -> Recovery:
    """Compare the figures of two models on the same task."""
    shared = sorted(quantized.each.keys() & original.each.keys())
    before = np.array([original.each[i] for i in shared])
    after = np.array([quantized.each[i] for i in shared])
    better, worse = quantized.value, original.value
    if not quantized.higher_is_better:
        better, worse = worse, better
    ratio = better / worse if worse else None
    interval = None
    if len(shared) > 1 and ratio is not None and before.any():
        drawn = np.random.default_rng(0).integers(len(shared), size=(RESAMPLES, len(shared)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = after[drawn].mean(axis=1) / before[drawn].mean(axis=1)
        low, high = np.nanpercentile(ratios[np.isfinite(ratios)], (2.5, 97.5))
        interval = float(low), float(high)
    return Recovery(
        ratio=ratio,
        interval=interval,
        lost=int((before > after).sum()),
        won=int((after > before).sum()),
    )


def compared(quantized: Sequence[Metric], original: Sequence[Metric]) -> tuple[TaskRow, ...]:
    """The figures of two models on the same tasks, side by side."""
    before = {(metric.task, metric.name): metric for metric in original}
    rows = [(before[metric.task, metric.name], metric) for metric in quantized]
    return tuple(
        TaskRow(original=old, quantized=new, recovery=recovery(new, old)) for old, new in rows
    )


def cells(metric: Metric, row: TaskRow | None = None) -> tuple[str, ...]:
    """A figure under `HEADER`, and beside the original's under `AGAINST`."""
    own = (metric.task, metric.name, str(metric.items), _told(metric))
    if row is None:
        return own
    left = row.recovery
    ratio = "-" if left.ratio is None else f"{left.ratio:.1%}"
    if left.interval is not None:
        ratio += " ({:.1%} to {:.1%})".format(*left.interval)
    flips = f"{left.lost} lost, {left.won} won" if metric.each else "-"
    return (*own, _told(row.original), ratio, flips)


def _told(metric: Metric) -> str:
    error = "" if metric.stderr is None else f" ± {metric.stderr:.4f}"
    return f"{metric.value:.4f}{error}"
