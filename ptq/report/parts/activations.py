"""The report's section on outlier channels of inputs, and on what smoothing did about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from formats.families.family import LatentAttention
from formats.families.registry import FAMILIES
from ptq.report.data import ReportData
from ptq.report.outliers import OutlierRow, by_ratio, distinct_inputs
from ptq.report.page.figure import new_panel
from ptq.report.page.page import Plot, Section, Table
from ptq.report.parts.loss import grid_of, number, one_of_experts

MOST_OUTLIERS = 12


def _readers() -> dict[str | None, tuple[str, str]]:
    """Layers that read an input, and their color, by the first of them or by what is smoothed."""
    readers: dict[str | None, tuple[str, str]] = {}
    for family in FAMILIES:
        names, norms = family.attention, family.norms
        if isinstance(names, LatentAttention):
            readers |= dict.fromkeys((names.q_a,), ("q, k, v", "C0"))
            readers |= dict.fromkeys((names.q_b, names.q_norm), ("q_b", "C4"))
        else:
            readers |= dict.fromkeys((names.q, norms.before_attention), ("q, k, v", "C0"))
            readers |= dict.fromkeys((names.o, names.v), ("o", "C1"))
        for layer in family.feed_forwards:
            readers |= dict.fromkeys((layer.gate, norms.before_feed_forward), ("gate, up", "C2"))
            readers |= dict.fromkeys((layer.down, layer.up), ("down", "C3"))
    return readers


READERS = _readers()


def activations_section(data: ReportData) -> Section:
    """Inputs whose channels differ most, and every smoothing group."""
    worst = by_ratio(distinct_inputs(data.outliers))[:MOST_OUTLIERS]
    tables = [_outliers(worst)] if worst else []
    text = (
        "One static scale must hold all channels of an input, so a channel far above the median "
        "costs all others their resolution. "
    )
    if count := data.quantization.sink_tokens:
        text += (
            f"The first {count} tokens of a sequence are sink tokens: their rows are quantized "
            "apart and are in no other figure. "
        )
    if data.quantization.smoothing:
        tables.append(_smoothing(data))
        text += (
            "SmoothQuant divides such channels and multiplies the weights that read them; alpha is "
            "how much of the difficulty moves into the weights, 1 all of it. Magnitudes are those "
            "of the model as it came. Errors are the squared error of "
            "the block's output, relative to its power, with only this group quantized."
        )
    shown = "Magnitudes of the layers' inputs, and smoothing strengths, by block"
    plot = Plot("activations", shown, partial(_draw, data))
    return Section("Activations and smoothing", text, (plot,), tuple(tables))


def _outliers(rows: Sequence[OutlierRow]) -> Table:
    return Table(
        ("input of", "largest", "median channel", "ratio", "channels", "median token", "sinks"),
        [
            (
                row.module,
                f"{row.absmax:.4g}",
                f"{row.median:.4g}",
                "" if row.ratio is None else f"{row.ratio:.1f}",
                ", ".join(map(str, row.channels)),
                "" if row.token_median is None else f"{row.token_median:.4g}",
                "" if row.sinks is None else f"{row.sinks:.4g}",
            )
            for row in rows
        ],
        "Inputs whose largest channel stands out most, as the model came",
    )


def _smoothing(data: ReportData) -> Table:
    rows = data.quantization.smoothing
    return Table(
        ("source", "alpha", "factors", "block error", "unsmoothed"),
        [
            (
                row.source,
                row.strength,
                f"{row.scale_min:.3g} to {row.scale_max:.3g}",
                *("–" if e is None else f"{e:.3g}" for e in (row.error, row.unsmoothed_error)),
            )
            for row in rows
        ],
        f"All {len(rows)} smoothing groups",
        folded=True,
    )


def _draw(data: ReportData) -> list[Axes]:
    """Channels of the layers' inputs, and what smoothing divided them by, block by block."""
    inputs = {row.module: row for row in distinct_inputs(data.outliers)}
    inputs = one_of_experts(inputs, lambda row: row.absmax)
    smoothing = {row.source: row for row in data.quantization.smoothing}
    names = (["inputs"] if inputs else []) + (["factors", "alpha"] if smoothing else [])
    panels = [new_panel(3.0, 3) for _ in names]
    for part, panel in zip(panels, names, strict=True):
        if panel == "inputs":
            part.set_title("Largest input (median token dotted, sinks x)")
            drawn = [(lambda row: row.absmax, "o-"), (lambda row: number(row.token_median), ":")]
            if any(row.sinks is not None for row in inputs.values()):
                drawn.append((lambda row: number(row.sinks), "x"))
            _lines(part, inputs, drawn)
            _log_scale(part)
        elif panel == "factors":
            part.set_title("Largest smoothing factor")
            _lines(part, smoothing, [(lambda row: row.scale_max, "o-")])
            _log_scale(part)
        else:
            part.set_title("Smoothing strength alpha")
            _lines(part, smoothing, [(lambda row: number(row.alpha), "o-")])
            part.set_ylim(-0.05, 1.05)
        part.legend(fontsize=8)
    return panels


def _lines(
    axes: Axes, rows: Mapping[str, Any], values: Sequence[tuple[Callable[[Any], float], str]]
) -> None:
    """A line over the blocks for each kind of layer, named after the layers that read the input."""
    kinds, blocks = grid_of(list(rows))
    for kind in kinds:
        label, color = READERS.get(kind, (kind, "C4"))
        for value, style in values:
            heights = [value(rows[b[kind]]) if kind in b else np.nan for b in blocks.values()]
            axes.plot(range(len(blocks)), heights, style, color=color, markersize=4, label=label)
            label = "_"  # one entry in the legend
    step = max(1, -(-len(blocks) // 10))
    axes.set_xticks(range(0, len(blocks), step), list(blocks)[::step])
    axes.set_xlabel("block")


def _log_scale(axes: Axes) -> None:
    """Logarithmic where the values span more than a factor of 10; small ranges stay readable."""
    low, high = axes.get_ylim()
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    drawn = drawn[np.isfinite(drawn)]
    if drawn.size and drawn.min() > 0 and drawn.max() > 10 * drawn.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(min(low, 0.0), high * 1.1)
