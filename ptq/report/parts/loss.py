"""The report's sections on where the loss comes from, on outlier channels, and on smoothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from formats.families.block_layers import any_expert, is_shared_expert, split_name
from formats.families.family import LatentAttention
from formats.families.registry import FAMILIES
from ptq.report.attribution import Attribution, Part
from ptq.report.data import ReportData
from ptq.report.inspection import OutlierRow, by_ratio, distinct_inputs
from ptq.report.page import (
    ORIGINAL,
    QUANTIZED,
    Plot,
    Section,
    Table,
    draw_dot,
    figure_of,
    new_panel,
)
from ptq.text import decibel, percent, scale_text

TITLE = "Where the loss comes from"


def loss_section(data: ReportData) -> Section:
    """KL divergence of every part, or why it was not measured."""
    found = data.attribution
    if isinstance(found, str):
        return Section(TITLE, f"This was not measured: {found}.")
    shown = "KL divergence with one kind of layer, and with one block, quantized at a time"
    return Section(
        TITLE,
        "Mean KL divergence to the original, in nats, with one part quantized and all else in "
        "float: first one kind of layer in all blocks, with its inputs where they are quantized, "
        "or the cache; then one block with all that is in it. Each part is that of the checkpoint, "
        f"on its real kernels. {found.sequences} of the evaluation sequences, {found.tokens:,} "
        "predictions: fewer than the figures above rest on, and the same for every part. Parts "
        "need not add up to the whole: errors may cancel or build on each other.",
        (Plot("loss", shown, partial(_draw_loss, found)),),
        (_table("kind", found.kinds, found), _table("block", found.blocks, found)),
    )


def _table(head: str, parts: Sequence[Part], found: Attribution) -> Table:
    total = sum(part.kl for part in parts)
    rows = [
        (part.name, f"{part.kl:.3g}", percent(part.kl / total, 0) if total else "")
        for part in parts
    ]
    rows += [
        ("sum of these", f"{total:.3g}", ""),
        ("all at once", f"{found.whole:.3g}", ""),
        ("nothing quantized", f"{found.unrounded:.2g}", ""),
    ]
    caption = f"By {head}"
    return Table((head, "KL, nats", "share of the sum"), rows, caption, folded=len(parts) > 5)


def _draw_loss(found: Attribution) -> list[Axes]:
    """A dot for each part, from zero on, beside a line for everything quantized."""
    panels = []
    for title, parts in (("One kind of layer", found.kinds), ("One block", found.blocks)):
        axes = new_panel(1.1 + 0.28 * len(parts), 2)
        for y, part in enumerate(reversed(parts)):
            draw_dot(axes, y, part.kl, None, QUANTIZED)
            place = {"xytext": (8, 0), "textcoords": "offset points"}
            axes.annotate(f"{part.kl:.2g}", (part.kl, y), va="center", fontsize=9, **place)
        axes.set_yticks(range(len(parts)), [part.name for part in reversed(parts)])
        axes.axvline(found.whole, color=ORIGINAL, linewidth=1)
        axes.text(
            found.whole, -0.85, "all at once ", ha="right", va="bottom", color=ORIGINAL, fontsize=9
        )
        axes.set_xlim(0, 1.15 * max(found.whole, *(part.kl for part in parts)) or 1.0)
        axes.set_ylim(-0.9, len(parts) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(f"{title} quantized: KL (nats)")
        panels.append(axes)
    return panels


def layers_section(data: ReportData) -> Section:
    """Signal-to-noise ratios of every quantized layer."""
    rows = [
        (
            row.module,
            f"{row.shape[0]} x {row.shape[1]}",
            decibel(row.weight_sqnr_db),
            decibel(row.output_sqnr_db),
            decibel(row.baseline_output_sqnr_db),
        )
        for row in data.quantization.modules
    ]
    if not rows:
        return Section("Layers", f"The scheme {data.scheme} leaves all linear layers as they are.")
    heads = ("module", "shape", "weight", "output", "plain output")
    shown = "Heat maps of the output SQNR of every layer"
    return Section(
        "Layers",
        "Signal-to-quantization-noise ratio in dB, 10 log10 of signal power over error power: 20 "
        "dB is an error of 10%, 40 dB of 1%; higher is better. Outputs are compared on calibration "
        "samples with the layer's weight and input quantized and all before it in float. "
        "'Plain' is round-to-nearest on the model as it came.",
        (Plot("layers", shown, partial(_draw_layers, data)),),
        (Table(heads, rows, f"All {len(rows)} layers, in dB", folded=True),),
    )


def _draw_layers(data: ReportData) -> list[Axes]:
    """Heat maps of output SQNR, of a block's experts the worst: as stored, and plainly rounded."""
    rows = one_of_experts(
        {row.module: row for row in data.quantization.modules},
        lambda row: -np.inf if row.output_sqnr_db is None else -row.output_sqnr_db,
    ).values()
    kinds, blocks = grid_of([row.module for row in rows])
    tables = (
        ("Output SQNR as stored (dB)", {row.module: row.output_sqnr_db for row in rows}),
        ("Plain round-to-nearest (dB)", {r.module: r.baseline_output_sqnr_db for r in rows}),
    )
    grids = [
        np.array([[number(values.get(blocks[b].get(k, ""))) for b in blocks] for k in kinds])
        for _, values in tables
    ]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    limits = (known.min(), known.max()) if known.size else (0.0, 1.0)
    panels = [new_panel(1.0 + 0.34 * len(kinds), 2) for _ in tables]
    for axes, grid, (title, _) in zip(panels, grids, tables, strict=True):
        heat_map(axes, grid, list(blocks), kinds, limits, "{:.0f}")
        axes.set_title(title)
        axes.set_xlabel("block")
    return panels


ANNOTATED_COLUMNS = 12  # heat maps up to this wide have their values written in


def one_of_experts(rows: Mapping[str, Any], height: Callable[[Any], float]) -> dict[str, Any]:
    """Rows by full name, of the same layer of a block's experts only the highest."""
    highest: dict[str, str] = {}
    for name, row in rows.items():
        kept = highest.setdefault(any_expert(name), name)
        if height(row) > height(rows[kept]):
            highest[any_expert(name)] = name
    return {name: rows[name] for name in highest.values()}


def grid_of(names: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Kinds of layers, and for each block, by its number, the full name of each kind."""
    kinds: dict[str, None] = {}
    blocks: dict[str, dict[str, str]] = {}
    for name in names:
        block, _, kind = split_name(name) or ("", "", name)
        kind = f"shared {kind}" if is_shared_expert(name) else kind
        kinds[kind] = None
        blocks.setdefault(block, {})[kind] = name
    return list(kinds), dict(sorted(blocks.items(), key=lambda own: int(own[0] or 0)))


def number(value: float | None) -> float:
    """A figure that can be drawn: what is missing is no number."""
    return float("nan") if value is None else value


def heat_map(
    axes: Axes,
    grid: np.ndarray,
    columns: Sequence[str],
    rows: Sequence[str],
    limits: tuple[float, float],
    form: str,
) -> None:
    """Draw a table as colors.

    Args:
        grid: Values [rows, columns]; NaN is left white.
        limits: Values of the darkest and of the brightest color.
        form: How values are written where there is room, such as `{:.0f}`.
    """
    low, high = limits
    high = high if high > low else low + 1.0
    image = axes.imshow(
        grid, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    figure_of(axes).colorbar(image, ax=axes, aspect=30)
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


def cache_section(data: ReportData) -> Section:
    """Scales of K and V, layer by layer and head by head."""
    entries = [e for e in data.scale_table.entries if e.role in ("k_cache", "v_cache")]
    table = Table(
        ("attention", "cache", "scales", "absmax", "clipped", "SQNR (dB)"),
        [
            (
                entry.module,
                entry.role[0].upper(),
                scale_text(entry.scale_min, entry.scale_max),
                f"{entry.absmax:.4g}",
                percent(entry.clip_fraction, 4),
                decibel(entry.sqnr_db),
            )
            for entry in entries
        ],
        f"All {len(entries)} scale tensors of the cache",
        folded=True,
    )
    text = (
        "Static scales of the cached keys (after the rotary embedding) and values, one for each KV "
        "head, as calibrated. A head much above its neighbours has outliers of its own. Of latent "
        "attention K is the rotated part of the keys and V the latent, one of each for all heads; "
        "of channels with scales of their own the largest is drawn."
    )
    if any(entry.sqnr_db is not None for entry in entries):
        text += (
            " SQNR in the table is the signal-to-quantization-noise ratio of the noisiest of the "
            "tensor's heads."
        )
    shown = "Heat maps of the cache's scales by layer and head"
    return Section(
        "Cache scales", text, (Plot("cache", shown, partial(_draw_cache, data)),), (table,)
    )


def _draw_cache(data: ReportData) -> list[Axes]:
    heads = [str(h) for h in range(len(data.kv_scales[0].k))]
    panels = []
    layers = [re.sub(r"\D+", "", row.module) for row in data.kv_scales]
    for title, rows in (
        ("K scales", [row.k for row in data.kv_scales]),
        ("V scales", [row.v for row in data.kv_scales]),
    ):
        grid, axes = np.array(rows).T, new_panel(1.1 + 0.34 * len(heads), 2)
        heat_map(axes, grid, layers, heads, (grid.min(), grid.max()), "{:.2g}")
        axes.set_title(title)
        axes.set_xlabel("layer")
        axes.set_ylabel("KV head")
        panels.append(axes)
    return panels


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
            f"Sink tokens, the first {count} of a sequence, are kept apart and are in no "
            "other figure. "
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
    plot = Plot("activations", shown, partial(_draw_activations, data))
    return Section("Activations and smoothing", text, (plot,), tuple(tables))


def _outliers(rows: Sequence[OutlierRow]) -> Table:
    heads = ("largest", "median channel", "ratio", "channels", "median token", "sinks")
    return Table(
        ("input of", *heads),
        [(row.module, *map(row.texts.__getitem__, heads)) for row in rows],
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


def _draw_activations(data: ReportData) -> list[Axes]:
    """Channels of the layers' inputs, and what smoothing divided them by, block by block."""
    inputs = {row.module: row for row in distinct_inputs(data.outliers)}
    inputs = one_of_experts(inputs, lambda row: row.absmax)
    smoothing = {row.source: row for row in data.quantization.smoothing}
    names = (["inputs"] if inputs else []) + (["factors", "alpha"] if smoothing else [])
    panels = [new_panel(3.0, 3) for _ in names]
    for part, panel in zip(panels, names, strict=True):
        if panel == "inputs":
            part.set_title("Largest input\n(median token dotted, sinks x)")
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
