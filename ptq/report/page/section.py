"""What sections of the report consist of.

They write themselves as Markdown, all but the plots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

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


def markdown_page(top: Top, sections: Iterable[Section]) -> str:
    """The page: verdict, tables and explanations."""
    parts = [f"# {_plain(top.title)}", _plain(top.line), _plain(top.headline)]
    for point in top.points:
        parts.append(f"- **{_plain(point.label)}**: {_plain(point.text)}")
        parts += [f"```\n{point.code}\n```"] if point.code else []
    parts += map(_table, top.tables)
    for section in sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield section.text
    if section.notes:
        yield "\n".join(f"- {_plain(note)}" for note in section.notes)
    for pair in section.pairs:
        yield from _pair(pair)
    for table in section.tables:
        if table.caption:
            yield f"{table.caption}:"
        yield _table(table)
    if section.code:
        yield f"```yaml\n{section.code.rstrip()}\n```"


def _pair(pair: Pair) -> Iterator[str]:
    """Both texts, indented as code: what is in them is no markup."""
    for name, text in (("original", pair.original), ("quantized", pair.quantized)):
        yield f"{_plain(pair.caption)}, {name}:"
        yield "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _table(table: Table) -> str:
    lines: Iterator[Cells] = iter((table.columns, *table.rows))
    first = _row(next(lines))
    rule = "|---|" + "---:|" * (len(table.columns) - 1)
    return "\n".join([first, rule, *map(_row, lines)])


def _row(cells: Cells) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = escape(text, quote=False)
    return "".join(f"\\{char}" if char in "|`*_[]\\" else char for char in text).replace("\n", " ")
