"""The report's plots, as SVG text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from formats.families.names import any_expert, is_shared_expert, split_name
from formats.families.registry import FAMILIES
from ptq.report.data import ReportData
from ptq.report.figure import LIMIT, ORIGINAL, QUANTIZED, STYLE, draw_dot, new_figure, svg_text
from ptq.report.outliers import distinct_inputs
from ptq.report.peers import draw_peers

ANNOTATED_COLUMNS = 12  # heat maps up to this wide have their values written in


def _readers() -> dict[str | None, tuple[str, str]]:
    """Layers that read an input, and their color, by the first of them or by what is smoothed."""
    readers: dict[str | None, tuple[str, str]] = {}
    for family in FAMILIES:
        names, norms = family.attention, family.norms
        readers |= dict.fromkeys((names.q, norms.before_attention), ("q, k, v", "C0"))
        readers |= dict.fromkeys((names.o, names.v), ("o", "C1"))
        for layer in family.feed_forwards:
            readers |= dict.fromkeys((layer.gate, norms.before_feed_forward), ("gate, up", "C2"))
            readers |= dict.fromkeys((layer.down, layer.up), ("down", "C3"))
    return readers


READERS = _readers()


def draw_plots(data: ReportData) -> dict[str, str]:
    """Every plot that the data allow, by the name that sections use: SVG without a prolog."""
    plots: dict[str, Callable[[ReportData], Figure]] = {
        "perplexity": _perplexity,
        "divergence": _divergence,
        "sizes": _sizes,
    }
    if data.quantization.modules:
        plots["layers"] = _layers
    if data.outliers or data.quantization.smoothing:
        plots["activations"] = _activations
    if data.kv_scales:
        plots["cache"] = _cache
    if any(row.accuracy for row in data.peers):
        plots["peers"] = draw_peers
    with rc_context(STYLE):
        return {name: svg_text(draw(data)) for name, draw in plots.items()}


def _perplexity(data: ReportData) -> Figure:
    """Perplexities and their ratio, with intervals and the threshold."""
    a = data.accuracy
    figure, (left, right) = new_figure(2.1, 2)
    for y, value, ends, color in (
        (1, a.perplexity_original, a.perplexity_original_ci, ORIGINAL),
        (0, a.perplexity_quantized, a.perplexity_quantized_ci, QUANTIZED),
    ):
        draw_dot(left, y, value, ends, color)
        left.annotate(f"{value:.3f}", (value, y), (0, 7), textcoords="offset points", ha="center")
        left.set_yticks([0, 1], ["quantized", "original"])
    left.set_title("Perplexity")
    left.set_ylim(-0.5, 1.6)
    draw_dot(right, 0, a.perplexity_ratio, a.perplexity_ratio_ci, QUANTIZED)
    right.axvline(1.0, color=ORIGINAL, linewidth=1)
    limit = next((c.limit for c in data.checks if c.name == "perplexity_ratio"), None)
    if limit is not None:
        right.axvline(limit, color=LIMIT, linestyle="--", linewidth=1)
        right.annotate("threshold", (limit, 0.42), (-3, 0), textcoords="offset points", ha="right")
    right.annotate(
        f"{a.perplexity_ratio:.4f}",
        (a.perplexity_ratio, 0),
        (0, 7),
        textcoords="offset points",
        ha="center",
    )
    right.set_yticks([])
    right.set_ylim(-0.5, 0.6)
    right.set_title("Ratio quantized / original")
    for axes in (left, right):
        axes.margins(x=0.15)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", visible=False)
    return figure


def _divergence(data: ReportData) -> Figure:
    """KL divergence: its percentiles, and its mean and the agreement by position."""
    a = data.accuracy
    figure, (left, middle, right) = new_figure(2.7, 3)
    names = ["median", "mean", "90%", "99%", "largest"]
    values = [a.kl_p50, a.kl_mean, a.kl_p90, a.kl_p99, a.kl_max]
    bars = left.barh(names[::-1], values[::-1], color=QUANTIZED)
    left.bar_label(bars, [f"{v:.2g}" for v in values[::-1]], padding=3, fontsize=9)
    left.set_title("KL divergence (nats)")
    left.grid(axis="y", visible=False)
    if min(values) > 0:
        left.set_xscale("log")
        left.set_xlim(min(values) / 3, max(values) * 8)
    labels = [f"{b.start}-{b.end - 1}" for b in a.positions]
    middle.bar(labels, [b.kl_mean for b in a.positions], color=QUANTIZED)
    middle.set_title("Mean KL by position")
    right.plot(labels, [100 * b.top1_agreement for b in a.positions], "o-", color=QUANTIZED)
    right.set_title("Top-1 agreement by position (%)")
    for axes in (middle, right):
        axes.tick_params(axis="x", rotation=60, labelsize=8)
        axes.grid(axis="x", visible=False)
    return figure


def _layers(data: ReportData) -> Figure:
    """Heat maps of output SQNR, of a block's experts the worst: as stored, and plainly rounded."""
    rows = one_of_experts(
        {row.module: row for row in data.quantization.modules},
        lambda row: -np.inf if row.output_sqnr_db is None else -row.output_sqnr_db,
    ).values()
    kinds, blocks = _grid([row.module for row in rows])
    tables = (
        ("Output SQNR as stored (dB)", {row.module: row.output_sqnr_db for row in rows}),
        ("Plain round-to-nearest (dB)", {r.module: r.baseline_output_sqnr_db for r in rows}),
    )
    grids = [
        np.array([[_number(values.get(blocks[b].get(k, ""))) for b in blocks] for k in kinds])
        for _, values in tables
    ]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    figure, axes = new_figure(1.0 + 0.34 * len(kinds), 2)
    for part, grid, (title, _) in zip(axes, grids, tables, strict=True):
        _heat_map(part, grid, list(blocks), kinds, low, high, "{:.0f}")
        part.set_title(title)
        part.set_xlabel("block")
    axes[1].set_yticks([])
    figure.colorbar(axes[1].images[0], ax=list(axes), shrink=0.9, aspect=30)
    return figure


def one_of_experts(rows: Mapping[str, Any], height: Callable[[Any], float]) -> dict[str, Any]:
    """Rows by full name, of the same layer of a block's experts only the highest."""
    highest: dict[str, str] = {}
    for name, row in rows.items():
        kept = highest.setdefault(any_expert(name), name)
        if height(row) > height(rows[kept]):
            highest[any_expert(name)] = name
    return {name: rows[name] for name in highest.values()}


def _grid(names: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Kinds of layers, and for each block the full name of each kind."""
    kinds: dict[str, None] = {}
    blocks: dict[str, dict[str, str]] = {}
    for name in names:
        block, _, kind = split_name(name) or ("", "", name)
        kind = f"shared {kind}" if is_shared_expert(name) else kind
        kinds[kind] = None
        blocks.setdefault(block, {})[kind] = name
    return list(kinds), blocks


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _heat_map(
    axes: Axes,
    grid: np.ndarray,
    columns: Sequence[str],
    rows: Sequence[str],
    low: float,
    high: float,
    form: str,
) -> None:
    high = high if high > low else low + 1.0
    axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    step = max(1, -(-len(columns) // 16))
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(len(rows)), rows)
    if len(columns) > ANNOTATED_COLUMNS:
        return
    for (y, x), value in np.ndenumerate(grid):
        dark = np.isfinite(value) and value < low + 0.6 * (high - low)
        text = form.format(value) if np.isfinite(value) else "-"
        axes.text(x, y, text, ha="center", va="center", color="w" if dark else "k", fontsize=8)


def _activations(data: ReportData) -> Figure:
    """Channels of the layers' inputs, and what smoothing divided them by, block by block."""
    inputs = {row.module: row for row in distinct_inputs(data.outliers)}
    inputs = one_of_experts(inputs, lambda row: row.absmax)
    smoothing = {row.source: row for row in data.quantization.smoothing}
    panels = (["inputs"] if inputs else []) + (["factors", "alpha"] if smoothing else [])
    figure, axes = new_figure(3.0, len(panels))
    for part, panel in zip(axes, panels, strict=True):
        if panel == "inputs":
            part.set_title("Largest input (median dotted)")
            _lines(part, inputs, [(lambda row: row.absmax, "o-"), (lambda row: row.median, ":")])
            _log_scale(part)
        elif panel == "factors":
            part.set_title("Largest smoothing factor")
            _lines(part, smoothing, [(lambda row: row.scale_max, "o-")])
            _log_scale(part)
        else:
            part.set_title("Smoothing strength alpha")
            _lines(part, smoothing, [(lambda row: _number(row.alpha), "o-")])
            part.set_ylim(-0.05, 1.05)
    axes[0].legend(fontsize=8)
    return figure


def _lines(
    axes: Axes, rows: Mapping[str, Any], values: Sequence[tuple[Callable[[Any], float], str]]
) -> None:
    """A line over the blocks for each kind of layer, named after the layers that read the input."""
    kinds, blocks = _grid(list(rows))
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


def _cache(data: ReportData) -> Figure:
    """Heat maps of the cache's scales, head by layer."""
    heads = [str(h) for h in range(len(data.kv_scales[0].k))]
    figure, axes = new_figure(1.1 + 0.34 * len(heads), 2)
    layers = [re.sub(r"\D+", "", row.module) for row in data.kv_scales]
    for part, title, rows in (
        (axes[0], "K scales", [row.k for row in data.kv_scales]),
        (axes[1], "V scales", [row.v for row in data.kv_scales]),
    ):
        grid = np.array(rows).T
        _heat_map(part, grid, layers, heads, grid.min(), grid.max(), "{:.2g}")
        part.set_title(title)
        part.set_xlabel("layer")
        part.set_ylabel("KV head")
        figure.colorbar(part.images[0], ax=part, aspect=30)
    return figure


def _sizes(data: ReportData) -> Figure:
    """Bars of both models' sizes and speeds."""
    s = data.sizes
    panels = [
        ("Weights (MB)", s.original_weights / 1e6, s.quantized_weights / 1e6),
        ("Cache per token (kB)", s.original_kv / 1e3, s.quantized_kv / 1e3),
    ]
    if data.speed is not None:
        o, q = data.speed.original, data.speed.quantized
        panels += [
            ("Prefill tokens/s", o.prefill_tokens_s.median, q.prefill_tokens_s.median),
            ("Decode tokens/s", o.decode_tokens_s.median, q.decode_tokens_s.median),
        ]
    figure, axes = new_figure(2.4, len(panels))
    for part, (title, *values) in zip(axes, panels, strict=True):
        bars = part.bar(["original", "quantized"], values, color=[ORIGINAL, QUANTIZED], width=0.6)
        part.bar_label(bars, [f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in values], padding=2)
        part.set_title(title)
        part.margins(y=0.18)
        part.grid(visible=False)
        part.set_yticks([])
        part.spines["left"].set_visible(False)
    return figure
