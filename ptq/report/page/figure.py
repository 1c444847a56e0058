"""How the report's plots look: colors, style, and what all of them are drawn with."""

from __future__ import annotations

import io
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
WIDTH = 9.0  # inches, of panels side by side
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def svg_text(axes: Axes) -> str:
    """The figure that axes are all of, as SVG without a prolog."""
    file = io.StringIO()
    figure_of(axes).savefig(file, format="svg", metadata=NO_METADATA)
    text = file.getvalue()
    return text[text.index("<svg") :]


def new_panel(height: float, share: int = 1) -> Axes:
    """Axes of a figure of its own, of that height in inches.

    A page puts panels side by side where it is wide enough for `share` of them.
    """
    figure = Figure(figsize=(WIDTH / share, height), layout="constrained")
    return figure.subplots()


def figure_of(axes: Axes) -> Figure:
    """The figure that axes are all of."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def draw_dot(
    axes: Axes, y: float, value: float, ends: tuple[float, float] | None, color: str
) -> None:
    """A value at height `y`, with its interval."""
    if ends is not None:
        axes.plot(ends, [y, y], color=color, linewidth=2.5, solid_capstyle="butt")
        axes.plot(ends, [y, y], "|", color=color, markersize=10, markeredgewidth=2)
    axes.plot([value], [y], "o", color=color, markersize=7)
