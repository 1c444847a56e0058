"""A page of the report: one HTML file that needs nothing else, or Markdown, and how its plots look.

The templates `page.html.j2` and `page.md.j2`, and the style, are in `templates` beside this file.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from ptq.report.generated import Completion

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


Cells = tuple[str, ...]
MARKED = {"holds": "holds", "MISSED": "missed"}  # classes of cells, by their text


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is aligned to the left, the others to the right.

    Attributes:
        columns: Heads.
        rows: As many cells each.
        caption: What it shows; a long table is folded under it.
        folded: Whether it is too long to be shown at once.
    """

    columns: Cells
    rows: Sequence[Cells]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Plot:
    """A plot of a section: panels that stand side by side on a wide page.

    Attributes:
        name: One word, by which it is found.
        text: What it shows, for those who cannot see it.
        draw: Draws the panels.
    """

    name: str
    text: str
    draw: Callable[[], Sequence[Axes]]


@dataclass(frozen=True)
class Section:
    """A headline, what its figures mean, and what is shown below it.

    Attributes:
        notes: Points of a list, above the plots.
        pairs: Texts to be read side by side.
    """

    title: str
    text: str
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    code: str = ""
    notes: tuple[str, ...] = ()
    pairs: tuple[Completion, ...] = ()


@dataclass(frozen=True)
class Point:
    """One of the answers on top of the page.

    Attributes:
        label: What is asked, in a few words.
        code: A command to paste, or nothing.
    """

    label: str
    text: str
    code: str = ""


@dataclass(frozen=True)
class Top:
    """What stands on top of the page.

    Attributes:
        line: When and with what it was made.
        outcome: `passed`, `failed`, or `open` where there are no thresholds.
        light: `green`, `amber`, `red`, or `grey` where there are no thresholds.
        points: Answers, in order.
    """

    title: str
    line: str
    outcome: str
    light: str
    headline: str
    points: tuple[Point, ...]
    tables: tuple[Table, ...]


def drawn(sections: Iterable[Section]) -> dict[str, tuple[str, ...]]:
    """The panels of all plots of sections as SVG, by the plot's name."""
    plots = [plot for section in sections for plot in section.plots]
    with rc_context(STYLE):
        return {plot.name: tuple(map(svg_text, plot.draw())) for plot in plots}


def html_page(top: Top, sections: Iterable[Section], plots: Mapping[str, Sequence[str]]) -> str:
    """The page.

    Args:
        top: What stands on top of it.
        plots: Panels as SVG text by the plot's name; a plot that is missing is left out.

    Returns:
        HTML that loads nothing: style and images are inside. All text is escaped.
    """
    template = _environment(autoescape=True).get_template("page.html.j2")
    return template.render(top=top, sections=sections, plots=plots, marked=MARKED) + "\n"


def markdown_page(top: Top, sections: Iterable[Section]) -> str:
    """The page: verdict, tables and explanations."""
    template = _environment(autoescape=False).get_template("page.md.j2")
    return template.render(top=top, sections=sections).rstrip("\n") + "\n"


def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("ptq.report", "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"base64": _base64, "width": _width, "plain": _plain, "row": _row, "code": _code}
    environment.filters |= filters
    return environment


def _base64(svg: str) -> str:
    return base64.b64encode(svg.encode()).decode()


def _width(svg: str) -> str:
    """Width of an image in pixels."""
    found = re.search(r'width="([\d.]+)pt"', svg)
    assert found is not None
    return f"{float(found[1]) * 4 / 3:.0f}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = escape(text, quote=False)
    return "".join(f"\\{char}" if char in "|`*_[]\\" else char for char in text).replace("\n", " ")


def _row(cells: Cells) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
