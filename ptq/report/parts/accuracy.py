"""The report's sections on what models predict: perplexity, divergence, tasks, texts, peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from inference.accuracy import Accuracy, Interval
from ptq.evaluate.figures import AGAINST, HEADER, cells
from ptq.peers.measure import PeerRow
from ptq.report.data import ReportData, method_names
from ptq.report.page import (
    LIMIT,
    ORIGINAL,
    QUANTIZED,
    Cells,
    Plot,
    Section,
    Table,
    draw_dot,
    new_panel,
)
from ptq.report.verdict import other_texts
from ptq.text import interval_text, percent, size_text

APART = 0.16  # of an axis' length: labels of ticks that are nearer would run into each other


def perplexity_section(data: ReportData) -> Section:
    """Both perplexities and their ratio."""
    a = data.accuracy
    rows = [
        ("original", f"{a.perplexity_original:.4f}", interval_text(a.perplexity_original_ci)),
        ("quantized", f"{a.perplexity_quantized:.4f}", interval_text(a.perplexity_quantized_ci)),
        ("ratio", f"{a.perplexity_ratio:.5f}", interval_text(a.perplexity_ratio_ci, 5)),
    ]
    shown = "Perplexity of both models and their ratio, with intervals"
    return Section(
        "Perplexity",
        "Perplexity is exp of the mean negative log-likelihood per token of the evaluation text; "
        "lower is better. Both models ran on this project's engine and its real kernels, the "
        "quantized cache included. The ratio is what quantization cost: 1 is no loss. Intervals "
        "are 95% percentile bootstrap intervals over sequences; that of the ratio is paired, so "
        f"what makes the text itself hard cancels out. {a.tokens:,} predictions in "
        f"{a.sequences:,} sequences.",
        (Plot("perplexity", shown, partial(_draw_perplexity, data)),),
        (Table(("perplexity", "value", "95% interval"), rows),),
    )


def divergence_section(data: ReportData) -> Section:
    """KL divergence and agreement, in all and by position."""
    a = data.accuracy
    figures = Table(
        ("", "value", "95% interval"),
        [
            ("mean KL divergence", f"{a.kl_mean:.3g}", interval_text(a.kl_mean_ci, 3, "g")),
            ("median", f"{a.kl_p50:.3g}", ""),
            ("90th percentile", f"{a.kl_p90:.3g}", ""),
            ("99th percentile", f"{a.kl_p99:.3g}", ""),
            ("largest", f"{a.kl_max:.3g}", ""),
            ("top-1 agreement", percent(a.top1_agreement), _percents(a.top1_agreement_ci)),
            ("top-5 agreement", percent(a.top5_agreement), ""),
        ],
    )
    positions = Table(
        ("position", "predictions", "original", "quantized", "mean KL", "top-1"),
        [
            (
                f"{b.start}-{b.end - 1}",
                f"{b.tokens:,}",
                f"{b.perplexity_original:.3f}",
                f"{b.perplexity_quantized:.3f}",
                f"{b.kl_mean:.3g}",
                percent(b.top1_agreement),
            )
            for b in a.positions
        ],
        "By position in the sequence: perplexities, KL divergence and agreement",
        folded=True,
    )
    kinds = Table(
        ("text", "predictions", "perplexity ratio", "mean KL", "95% interval", "top-1"),
        [
            (
                kind,
                f"{b.tokens:,}",
                f"{b.perplexity_ratio:.4f}",
                f"{b.kl_mean:.3g}",
                interval_text(b.kl_mean_ci, 3, "g"),
                percent(b.top1_agreement),
            )
            for kind, b in ((data.evaluation.kind_name, a), *other_texts(data))
        ],
    )
    shown = "KL divergence: percentiles, mean by position, and top-1 agreement by position"
    return Section(
        "Divergence and agreement",
        "The Kullback-Leibler divergence KL(original || quantized), in nats, compares the two "
        "models' whole distributions at every position; 0 is no loss. Top-1 agreement is the share "
        "of positions where both hold the same token for the most likely; top-5 agreement the "
        "share of the original's five most likely tokens that are among the quantized model's "
        "five. An error that grows along the sequence points at the cache.",
        (Plot("divergence", shown, partial(_draw_divergence, a)),),
        (figures, *([kinds] if other_texts(data) else []), positions),
    )


def _percents(ends: Interval | None) -> str:
    return interval_text(ends and (100 * ends[0], 100 * ends[1]), 2)


def _draw_perplexity(data: ReportData) -> list[Axes]:
    """Perplexities and their ratio, with intervals and the threshold."""
    a = data.accuracy
    left, right = panels = [new_panel(2.1, 2) for _ in "pr"]
    for y, value, ends, color in (
        (1, a.perplexity_original, a.perplexity_original_ci, ORIGINAL),
        (0, a.perplexity_quantized, a.perplexity_quantized_ci, QUANTIZED),
    ):
        draw_dot(left, y, value, ends, color)
        _write(left, f"{value:.3f}", value, y)
    left.set_yticks([0, 1], ["quantized", "original"])
    left.set_title("Perplexity")
    left.set_ylim(-0.5, 1.6)
    left.margins(x=0.15)
    left.xaxis.set_major_locator(MaxNLocator(5))
    limit = next((c.limit for c in data.checks if c.name == "perplexity_ratio"), None)
    _draw_ratio(right, a, limit)
    for axes in panels:
        axes.grid(axis="y", visible=False)
    return panels


def _draw_ratio(axes: Axes, a: Accuracy, limit: float | None) -> None:
    """The ratio beside 1, which is no loss, and its threshold: each has a tick of its own."""
    draw_dot(axes, 0, a.perplexity_ratio, a.perplexity_ratio_ci, QUANTIZED)
    _write(axes, f"{a.perplexity_ratio:.4f}", a.perplexity_ratio, 0)
    axes.axvline(1.0, color=ORIGINAL, linewidth=1)
    _write(axes, " no loss", 1.0, 0.95, above=0, side="left", color=ORIGINAL)
    marks = [1.0]
    if limit is not None:
        axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1)
        side = "right" if limit > 1 else "left"
        _write(axes, " threshold ", limit, 0.95, above=0, side=side, color=LIMIT)
        marks.append(limit)
    drawn = [*marks, a.perplexity_ratio, *(a.perplexity_ratio_ci or ())]
    drawn = [x for x in drawn if math.isfinite(x)]
    width = max(drawn) - min(drawn) or 0.01
    low, high = min(drawn) - 0.15 * width, max(drawn) + 0.15 * width
    axes.set_xlim(low, high)
    ticks = _ticks(marks, low, high)
    digits = 3 if high - low > 0.004 else 4
    axes.set_xticks(ticks, [f"{tick:.{digits}f}" for tick in ticks])
    axes.set_yticks([])
    axes.set_ylim(-0.5, 1.2)
    axes.set_title("Ratio quantized / original")


def _ticks(marks: Sequence[float], low: float, high: float) -> list[float]:
    """The marks, and round numbers of the axis from `low` to `high` where there is room."""
    ticks: list[float] = []
    for tick in (*marks, *MaxNLocator(5).tick_values(low, high)):
        free = all(abs(tick - other) > APART * (high - low) for other in ticks)
        if low <= tick <= high and free:
            ticks.append(float(tick))
    return sorted(ticks)


def _write(
    axes: Axes,
    text: str,
    x: float,
    y: float,
    *,
    above: int = 7,
    side: Literal["left", "center", "right"] = "center",
    color: str = "#0f172a",
) -> None:
    """Write a text `above` points over a place, which is its left end, middle or right end."""
    place = {"xytext": (0, above), "textcoords": "offset points"}
    axes.annotate(text, (x, y), ha=side, color=color, fontsize=9, **place)


def _draw_divergence(a: Accuracy) -> list[Axes]:
    """KL divergence: its percentiles, and its mean and the agreement by position."""
    left, middle, right = panels = [new_panel(2.7, 3) for _ in "kkt"]
    values = {"median": a.kl_p50, "mean": a.kl_mean, "90%": a.kl_p90, "99%": a.kl_p99}
    values["largest"] = a.kl_max
    for y, value in enumerate(reversed(values.values())):
        draw_dot(left, y, value, None, QUANTIZED)
        _write(left, f"{value:.2g}", value, y)
    left.set_yticks(range(len(values)), list(reversed(values)))
    left.set_ylim(-0.5, len(values) - 0.2)
    left.set_title("KL divergence (nats)")
    if min(values.values()) > 0:
        left.set_xscale("log")
    left.margins(x=0.2)
    _by_position(middle, a, [(b.kl_mean, b.kl_ci) for b in a.positions], 1.0)
    middle.set_ylim(bottom=0)
    middle.set_title("Mean KL by position")
    shares = [(b.top1_agreement, b.top1_ci) for b in a.positions]
    _by_position(right, a, shares, 100.0)
    if any(ends is None for _, ends in shares):  # how much chance is in it is not known: all of it
        right.set_ylim(0, 103)
    right.set_title("Top-1 agreement, %")
    return panels


def _by_position(
    axes: Axes, a: Accuracy, values: Sequence[tuple[float, Interval | None]], unit: float
) -> None:
    """Values over the positions, with their intervals."""
    for x, (value, ends) in enumerate(values):
        if ends is not None:
            axes.plot([x, x], [unit * end for end in ends], color=QUANTIZED, linewidth=2)
        axes.plot([x], [unit * value], "o", color=QUANTIZED, markersize=5)
    labels = [f"{b.start}-{b.end - 1}" for b in a.positions]
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", rotation=60, labelsize=8)
    axes.margins(x=0.08)
    axes.grid(axis="x", visible=False)


def tasks_section(data: ReportData) -> Section:
    """What is left of the original's figures, and how many answers flipped."""
    rows = [cells(row.quantized, row) for row in data.tasks]
    return Section(
        "Standard tasks",
        "Both models answered the same items, on the same engine, through lm-eval. Recovery is the "
        "quantized model's figure over the original's (the reverse of perplexities, so that less "
        "than 100% is a loss), with a 95% interval from drawing the items anew. Flips are items "
        "that one of the two has right and the other has not: a model may keep its accuracy and "
        "still answer differently.",
        tables=(Table((*HEADER, *AGAINST), rows),),
    )


def completions_section(data: ReportData) -> Section:
    """Completions side by side, from where they differ marked."""
    same = sum(row.original == row.quantized for row in data.completions)
    return Section(
        "Side by side",
        "Both models go on from the same beginnings of evaluation text, always with the most "
        f"likely token. {same} of {len(data.completions)} completions are equal; of the others, "
        "what follows the first difference is marked. One token that is chosen otherwise changes "
        "all that follows, so a difference is not yet a fault: read whether both make sense.",
        pairs=data.completions,
    )


OWN = "this run"
PEER_HEADS = (
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


def peers_section(data: ReportData) -> Section:
    """This run and what other tools made of the same model."""
    shown = "Perplexity ratio and mean KL divergence of this run and of other tools"
    plot = Plot("peers", shown, partial(_draw_peers, data))
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
        (Table(PEER_HEADS, [_own_row(data), *peer_rows(data.peers)]),),
        notes=failed,
    )


def peer_rows(peers: tuple[PeerRow, ...]) -> Iterator[Cells]:
    """Cells under `PEER_HEADS`; those of a tool that could not run are empty."""
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


def _draw_peers(data: ReportData) -> list[Axes]:
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
