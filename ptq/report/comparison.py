"""The reports of several runs side by side, as one table and one plot.

The plot has KL divergence against the size of the weights. Runs stand where they were measured; a
line runs along those that no other one beats in both. Other tools are points without a measured
size: they stand at that of our runs of as many bits, or, where there is none, in a column of their
own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from pydantic import ValidationError

from formats.errors import RequestError
from ptq.output import PEERS_FILE
from ptq.peers.measure import PeerRow, PeersRecord
from ptq.report.data import ReportData, method_names
from ptq.report.page import ORIGINAL, QUANTIZED, STYLE, new_panel, svg_text

R = TypeVar("R", ReportData, PeersRecord)
REPORT = "report/report.json"
CELLS = {  # of what may not have been measured
    "weights": "x {:.2f}",
    "cache": "x {:.2f}",
    "prefill": "x {:.2f}",
    "decode": "x {:.2f}",
    "top1": "{:.1%}",
    "seconds": "{:.0f} s",
}


def load_reports(outputs: Sequence[Path]) -> dict[str, ReportData | PeersRecord]:
    """Reports, or records of peers alone, by the name of their output directory.

    Raises:
        RequestError: one is missing or damaged, two have one name, or they do not compare with the
            same original on the same tokens.
    """
    reports: dict[str, ReportData | PeersRecord] = {}
    for output in outputs:
        name = output.resolve().name
        if {name, f"{name}/{PEERS_FILE}"} & set(reports):
            raise RequestError(f"two of the outputs are named {name!r}; rename one")
        alone = (output / PEERS_FILE).exists()
        if alone:
            reports[f"{name}/{PEERS_FILE}"] = _load(output / PEERS_FILE, PeersRecord)
        if not alone or (output / REPORT).exists():
            reports[name] = _load(output / REPORT, ReportData)
    first, *others = reports.items()
    for name, report in others:
        for what, found, wanted in (
            ("model", report.model, first[1].model),
            ("tokens", report.evaluation.fingerprint, first[1].evaluation.fingerprint),
        ):
            if found != wanted:
                raise RequestError(
                    f"{name} and {first[0]} were not measured on the same {what}; compare runs of "
                    "one model and one evaluation split"
                )
    return reports


def _load(path: Path, model: type[R]) -> R:
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"{path}: not a readable report ({reason}). Give output directories of finished runs; "
            "`ptq report OUTPUT` writes the report again"
        ) from error


def table(reports: dict[str, ReportData | PeersRecord]) -> pd.DataFrame:
    """One row for each run and each peer that ran, the least KL divergence first.

    A row holds figures against the original, and what the run took; sizes and speeds of peers are
    not measured. Of a peer that several of the runs measured, the first one counts.
    """
    runs = [row_of(name, r) for name, r in reports.items() if isinstance(r, ReportData)]
    measured = [row for report in reports.values() for row in report.peers if row.accuracy]
    peers = {(row.name, row.version): row for row in reversed(measured)}
    frame = pd.DataFrame([*runs, *map(_peer_row, peers.values())])
    if frame.empty:
        raise RequestError("none of the outputs holds a figure: every peer failed, see its log")
    return frame.sort_values("kl", kind="stable", ignore_index=True)


def _peer_row(peer: PeerRow) -> dict[str, Any]:
    accuracy = peer.accuracy
    assert accuracy is not None
    unmeasured = ("weights", "cache", "prefill", "decode")
    return {
        "run": peer.name,
        "scheme": f"{peer.package} {peer.version}",
        "methods": peer.method,
        "perplexity": accuracy.perplexity_ratio,
        "kl": accuracy.kl_mean,
        "top1": accuracy.top1_agreement,
        "seconds": peer.seconds,
    } | dict.fromkeys(unmeasured, math.nan)


def row_of(name: str, report: ReportData) -> dict[str, Any]:
    """A run's row of the table."""
    accuracy, sizes, speed = report.accuracy, report.sizes, report.speed
    row: dict[str, Any] = {
        "run": name,
        "scheme": report.scheme,
        "methods": method_names(report.recipe),
        "weights": sizes.quantized_weights / sizes.original_weights,
        "cache": sizes.quantized_kv / sizes.original_kv,
        "perplexity": accuracy.perplexity_ratio,
        "kl": accuracy.kl_mean,
        "top1": accuracy.top1_agreement,
        "seconds": report.quantization.seconds["total"],
    }
    for phase in ("prefill", "decode"):
        name = f"{phase}_tokens_s"
        row[phase] = speed and (
            getattr(speed.quantized, name).median / getattr(speed.original, name).median
        )
    return row


def markdown(frame: pd.DataFrame) -> str:
    """The table as Markdown, with a column of models if it has one; sizes and speeds as factors."""
    head = (
        "| recipe | scheme | methods | weights | cache | perplexity | KL, nats | top-1 agreement "
        "| prefill | decode | quantized in |"
    )
    several = "model" in frame
    lines = [f"| model {head}" if several else head, "|---" * (11 + several) + "|"]
    for row in frame.to_dict("records"):
        weights, cache, *speeds, top1, seconds = (
            "" if pd.isna(row[key]) else form.format(row[key]) for key, form in CELLS.items()
        )
        cells = (
            *([row["model"]] if several else []),
            f"`{row['run']}`",
            row["scheme"],
            row["methods"],
            weights,
            cache,
            f"x {row['perplexity']:.4f}",
            f"{row['kl']:#.3g}",
            top1,
            *speeds,
            seconds,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


HEIGHT = 8.0  # inches
APART = 0.0235  # of the axis' height, between labels
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
    kinds = [kind for kind in kinds if any(p.color == kind[1] for p in points)]
    if any(p.tool for p in points):
        kinds.append(("other tools, at the size of our runs of as many bits", ORIGINAL, "white"))
    for name, color, face in kinds:
        axes.plot([], [], "o", color=color, markerfacecolor=face, markersize=6, label=name)
    axes.plot([], [], color=QUANTIZED, alpha=0.35, linewidth=2, label="no run is better in both")
    axes.legend(fontsize=8, loc="upper right")
