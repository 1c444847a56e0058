"""What sections of the report consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

Cells = tuple[str, ...]


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
class Pair:
    """Two texts to be read side by side, and how many characters at their start are the same."""

    caption: str
    original: str
    quantized: str
    common: int


@dataclass(frozen=True)
class Section:
    """A headline, what its figures mean, and what is shown below it.

    Attributes:
        title: The headline.
        text: A paragraph.
        plots: Shown in this order.
        tables: Below them.
        code: Text to be copied, folded.
        notes: Points of a list, above the plots.
        pairs: Texts of both models side by side.
    """

    title: str
    text: str
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    code: str = ""
    notes: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Point:
    """One of the answers on top of the page.

    Attributes:
        label: What is asked, in a few words.
        text: The answer.
        code: A command to paste, or nothing.
    """

    label: str
    text: str
    code: str = ""


@dataclass(frozen=True)
class Top:
    """What stands on top of the page.

    Attributes:
        title: Model and scheme.
        line: When and with what it was made.
        outcome: `passed`, `failed`, or `open` where there are no thresholds.
        light: `green`, `amber`, `red`, or `grey` where there are no thresholds.
        headline: The verdict in a sentence.
        points: Answers, in order.
        tables: Thresholds and figures.
    """

    title: str
    line: str
    outcome: str
    light: str
    headline: str
    points: tuple[Point, ...]
    tables: tuple[Table, ...]
