"""The report's section on other tools: text, table and plot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from inference.accuracy import Accuracy
from ptq.peers.measure import PeerRow
from ptq.recipe.strict_yaml import parse
from ptq.report.data import ReportData
from ptq.report.page.figure import ORIGINAL, QUANTIZED, draw_dot, new_panel
from ptq.report.page.page import Cells, Plot, Section, Table
from ptq.text import interval_text, percent, size_text

OWN = "this run"
HEADS = (
    "tool",
    "method",
    "perplexity ratio",
    "its 95% interval",
    "mean KL (nats)",
    "its 95% interval",
    "top-1",
    "quantized in",
    "peak memory",
    "threads",
    "version",
)


def method_names(recipe: str) -> str:
    """The methods of a resolved recipe."""
    methods = parse(recipe).data.get("methods", [])
    return ", ".join(next(iter(method)) for method in methods) or "none"


def peers_section(data: ReportData) -> Section:
    """This run and what other tools made of the same model."""
    shown = "Perplexity ratio and mean KL divergence of this run and of other tools"
    plot = Plot("peers", shown, partial(_draw, data))
    ran = any(row.accuracy for row in data.peers)
    failed = tuple(f"{row.name} could not run: {row.error}" for row in data.peers if row.error)
    return Section(
        "Beside other tools",
        "The same model, calibration tokens and evaluation tokens, and the same definitions as "
        "above. Each tool ran in a process of its own, and its model in transformers, in fp32 "
        "beside what it quantizes; this run's model ran on the engine and its real kernels. The "
        "time of a tool is that of its quantization alone, without loading the model (bitsandbytes "
        "quantizes while it loads: both count); that of this run is its whole time, reading, "
        "measuring and writing included. Memory is the largest "
        "resident memory of the process up to the end of its quantization.",
        (plot,) if ran else (),
        (Table(HEADS, [_own_row(data), *peer_rows(data.peers)]),),
        notes=failed,
    )


def peer_rows(peers: tuple[PeerRow, ...]) -> Iterator[Cells]:
    """Cells under `HEADS`; those of a tool that could not run are empty."""
    for row in peers:
        figures = ("",) * 5 if row.accuracy is None else _figures(row.accuracy)
        yield (
            row.name,
            row.method,
            *figures,
            "could not run" if row.seconds is None or row.error else f"{row.seconds:.1f} s",
            "" if row.peak_rss_bytes is None else size_text(row.peak_rss_bytes),
            str(row.threads),
            f"{row.package} {row.version or '(not installed)'}",
        )


def _own_row(data: ReportData) -> Cells:
    run = data.quantization
    return (
        OWN,
        f"{data.scheme}, {method_names(data.recipe)}",
        *_figures(data.accuracy),
        f"{run.seconds.get('total', 0.0):.1f} s",
        size_text(run.peak_rss_bytes),
        str(data.environment["threads"]),
        "",
    )


def _figures(a: Accuracy) -> Cells:
    return (
        f"{a.perplexity_ratio:.4f}",
        interval_text(a.perplexity_ratio_ci),
        f"{a.kl_mean:.3g}",
        interval_text(a.kl_mean_ci, 3, "g"),
        percent(a.top1_agreement),
    )


def _draw(data: ReportData) -> list[Axes]:
    """Perplexity ratio and mean KL of this run and of each tool that ran, with intervals."""
    rows = [(OWN, data.accuracy, QUANTIZED)]
    rows += [(row.name, row.accuracy, ORIGINAL) for row in data.peers if row.accuracy]
    rows.sort(key=lambda row: -row[1].kl_mean)
    left, right = panels = [new_panel(0.9 + 0.32 * len(rows), 2) for _ in "kr"]
    for y, (_, a, color) in enumerate(rows):
        draw_dot(left, y, a.kl_mean, a.kl_mean_ci, color)
        draw_dot(right, y, a.perplexity_ratio, a.perplexity_ratio_ci, color)
    left.set_yticks(range(len(rows)), [name for name, *_ in rows])
    left.set_title("Mean KL divergence (nats)")
    if all(a.kl_mean > 0 for _, a, _ in rows):
        left.set_xscale("log")
    right.set_yticks(range(len(rows)), [name for name, *_ in rows])
    right.set_title("Perplexity ratio")
    right.axvline(1.0, color=ORIGINAL, linewidth=1)
    for axes in (left, right):
        axes.margins(x=0.1, y=0.6 / len(rows))
    return panels
