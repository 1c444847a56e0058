"""What runs cost and save as one plot: KL divergence against the size of the weights.

Runs stand where they were measured; a line runs along those that no other one beats in both. Other
tools are points without a measured size: they stand at that of our runs of as many bits, or, where
there is none, in a column of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes

from ptq.report.page.figure import ORIGINAL, QUANTIZED, STYLE, new_panel, svg_text

HEIGHT = 6.5  # inches
APART = 0.029  # of the axis' height, between labels
COLUMN = 0.03  # of the original's size: points that are nearer share a column of labels
UNKNOWN = 1.4  # where tools stand whose size nothing tells
CACHE = "#0f766e"


@dataclass(frozen=True)
class Point:
    """A run or another tool: its name, size of the weights as a factor, KL divergence, color."""

    name: str
    size: float
    kl: float
    color: str
    tool: bool


def draw(frame: pd.DataFrame) -> str:
    """The plot of a table from `ptq.report.comparison.table`, as SVG."""
    points = list(_points(frame))
    with rc_context(STYLE):
        axes = new_panel(HEIGHT)
        axes.set_yscale("log")
        sizes, losses = [p.size for p in points], [p.kl for p in points]
        axes.set_xlim(min(sizes) - 0.24, max(sizes) + 0.14)
        axes.set_ylim(min(losses) / 1.6, max(losses) * 1.6)
        line = pareto([(p.size, p.kl) for p in points if not p.tool])
        along, down = [size for size, _ in line], [loss for _, loss in line]
        axes.step(along, down, where="post", color=QUANTIZED, alpha=0.35, linewidth=2)
        _set_ticks(axes, sizes)
        for p in points:
            face = "white" if p.tool else p.color
            axes.plot(p.size, p.kl, "o", color=p.color, markerfacecolor=face, markersize=6)
        columns = _columns(points)
        for i, column in enumerate(columns):
            left = [p for p in column if p.tool and i == 0]
            _label(axes, left, toward=-1)
            _label(axes, [p for p in column if p not in left], toward=1)
        _explain(axes, points)
        return svg_text(axes)


def _set_ticks(axes: Axes, sizes: Sequence[float]) -> None:
    """Ticks of the sizes that are known, and one for those that are not."""
    known = [size for size in sizes if size != UNKNOWN]
    ticks = {x / 5: f"{x / 5:.1f}" for x in range(10)}
    if known:
        low, high = min(known) - 0.2, max(known) + 0.1
        ticks = {x: text for x, text in ticks.items() if low < x < high}
    if not known or len(known) < len(sizes):
        ticks = (ticks if known else {}) | {UNKNOWN: "not known"}
    axes.set_xticks(list(ticks), list(ticks.values()))


def _points(frame: pd.DataFrame) -> Iterator[Point]:
    """Runs, and tools at the size of the smallest run of as many bits."""
    by_bits: dict[str, float] = {}
    for row in frame.to_dict("records"):
        if not pd.isna(row["weights"]):
            color = CACHE if row["cache"] < 0.9 else QUANTIZED
            yield Point(row["run"], float(row["weights"]), float(row["kl"]), color, tool=False)
            for bits in re.findall(r"w(\d)", row["scheme"]):
                by_bits[bits] = min(by_bits.get(bits, math.inf), float(row["weights"]))
    for row in frame.to_dict("records"):
        if pd.isna(row["weights"]):
            bits = re.search(r"(?:int|NF)(\d)", row["methods"])
            size = by_bits.get(bits[1], UNKNOWN) if bits is not None else UNKNOWN
            name = f"{row['run']} ({row['scheme']})" if row["scheme"] else row["run"]
            yield Point(name, size, float(row["kl"]), ORIGINAL, tool=True)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (size, loss) that no other point matches in both and beats in one, by size."""
    best: list[tuple[float, float]] = []
    for size, loss in sorted(points):
        if not best or loss < best[-1][1]:
            best.append((size, loss))
    return best


def _columns(points: Sequence[Point]) -> list[list[Point]]:
    """Points of nearly one size together, the smallest sizes first."""
    columns: list[list[Point]] = []
    for p in sorted(points, key=lambda p: p.size):
        if columns and p.size - columns[-1][0].size < COLUMN:
            columns[-1].append(p)
        else:
            columns.append([p])
    return columns


def _label(axes: Axes, points: Sequence[Point], *, toward: int) -> None:
    """Names beside points, moved apart where they would lie on each other."""
    if len(points) == 1:
        (p,) = points
        below = {"xytext": (0, -14), "textcoords": "offset points"}
        axes.annotate(p.name, (p.size, p.kl), ha="center", fontsize=8, color=p.color, **below)
        return
    place = axes.transAxes.inverted()
    ranked = sorted(points, key=lambda p: p.kl)
    wanted = [place.transform(axes.transData.transform((p.size, p.kl)))[1] for p in ranked]
    for p, height in zip(ranked, _moved_apart(wanted), strict=True):
        edge = max(q.size for q in points) if toward > 0 else min(q.size for q in points)
        across = place.transform(axes.transData.transform((edge, p.kl)))[0] + 0.022 * toward
        axes.annotate(
            p.name,
            (p.size, p.kl),
            (across, height),
            textcoords="axes fraction",
            ha="left" if toward > 0 else "right",
            va="center",
            fontsize=8,
            color=p.color,
            arrowprops={"arrowstyle": "-", "color": "#cbd5e1", "linewidth": 0.7},
        )


def _moved_apart(heights: Sequence[float]) -> list[float]:
    """Ascending heights, at least `APART` from each other and as near to where they were.

    Runs of labels that touch are moved as one: each to the middle of its own wishes.
    """
    groups: list[tuple[float, int]] = []  # wish for the lowest of a run, labels in it
    for height in heights:
        wish, count = height, 1
        while groups and groups[-1][0] + APART * groups[-1][1] > wish:
            below, more = groups.pop()
            wish = (below * more + (wish - APART * more) * count) / (more + count)
            count += more
        groups.append((wish, count))
    return [wish + APART * i for wish, count in groups for i in range(count)]


def _explain(axes: Axes, points: Sequence[Point]) -> None:
    axes.set_xlabel("weights on disk, as a factor of the original's")
    axes.set_ylabel("KL divergence to the original (nats)")
    axes.set_title("What each run costs, and what it saves")
    kinds = [("float cache", QUANTIZED, QUANTIZED), ("quantized cache", CACHE, CACHE)]
    if any(p.tool for p in points):
        kinds.append(("other tools, at the size of our runs of as many bits", ORIGINAL, "white"))
    for name, color, face in kinds:
        axes.plot([], [], "o", color=color, markerfacecolor=face, markersize=6, label=name)
    axes.plot([], [], color=QUANTIZED, alpha=0.35, linewidth=2, label="no run is better in both")
    axes.legend(fontsize=8, loc="upper right")
