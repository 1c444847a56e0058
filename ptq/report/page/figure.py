"""How the report's plots look: colors, style, and what all of them are drawn with."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ORIGINAL, QUANTIZED, LIMIT = "#64748b", "#2563eb", "#b91c1c"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ptq",  # equal data give equal files
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "xtick.color": "#334155",
    "ytick.color": "#334155",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
}
WIDTH = 9.0  # inches
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def svg_text(figure: Figure) -> str:
    """A figure as SVG without a prolog."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata=NO_METADATA)
    text = file.getvalue()
    return text[text.index("<svg") :]


def new_figure(height: float, columns: int, widths: Sequence[float] | None = None):
    """A figure of that height in inches, and its axes side by side."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns, width_ratios=widths, squeeze=False)[0]


def draw_dot(
    axes: Axes, y: float, value: float, ends: tuple[float, float] | None, color: str
) -> None:
    """A value at height `y`, with its interval."""
    if ends is not None:
        axes.plot(ends, [y, y], color=color, linewidth=2.5, solid_capstyle="butt")
        axes.plot(ends, [y, y], "|", color=color, markersize=10, markeredgewidth=2)
    axes.plot([value], [y], "o", color=color, markersize=7)
