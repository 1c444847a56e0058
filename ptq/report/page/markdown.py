"""A page of the report as Markdown: everything but the plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from ptq.report.page.section import Cells, Pair, Section, Table, Top


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
