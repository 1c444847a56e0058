"""Layers by kind and block: the grid that heat maps and lines over the blocks are drawn on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from formats.families.names import any_expert, is_shared_expert, split_name
from ptq.report.page.figure import figure_of

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
    """Kinds of layers, and for each block the full name of each kind."""
    kinds: dict[str, None] = {}
    blocks: dict[str, dict[str, str]] = {}
    for name in names:
        block, _, kind = split_name(name) or ("", "", name)
        kind = f"shared {kind}" if is_shared_expert(name) else kind
        kinds[kind] = None
        blocks.setdefault(block, {})[kind] = name
    return list(kinds), blocks


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
        axes: Where.
        grid: Values [rows, columns]; NaN is left white.
        columns: Their names.
        rows: Their names.
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
