"""A page of the report as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from inference.accuracy import Interval
from inference.bench.figures import Percentiles, Spread
from ptq.report.page.section import Cells, Pair, Plot, Section, Table, Top


def interval_text(ends: Interval | None, digits: int = 4, form: str = "f") -> str:
    """An interval, or that there was too little to tell one."""
    if ends is None:
        return "needs 2 sequences"
    return f"{ends[0]:.{digits}{form}} to {ends[1]:.{digits}{form}}"


def spread_text(spread: Spread) -> str:
    """Median with the least and the greatest."""
    return f"{spread.median:,.0f} ({spread.low:,.0f} to {spread.high:,.0f})"


def percentiles_text(ms: Percentiles) -> str:
    """Three percentiles."""
    return f"{ms.p50:.1f} / {ms.p90:.1f} / {ms.p99:.1f}"


STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f1f5f9; color: #0f172a; line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
.made { font-size: .875rem; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
section { background: #fff; border: 1px solid #e2e8f0; border-radius: .5rem;
  padding: 1rem 1.25rem; margin: 0 0 1rem; }
p { margin: 0 0 .75rem; max-width: 48rem; color: #334155; overflow-wrap: anywhere; }
.verdict { border-left: .5rem solid #64748b; }
.verdict strong { font-size: 1.25rem; }
.green .verdict { border-left-color: #15803d; } .green strong { color: #15803d; }
.amber .verdict { border-left-color: #b45309; } .amber strong { color: #b45309; }
.red .verdict { border-left-color: #b91c1c; } .red strong { color: #b91c1c; }
dl { margin: 0 0 1rem; display: grid; grid-template-columns: 9.5rem 1fr; gap: .4rem 1rem; }
dt { color: #475569; font-weight: 600; } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
dd pre { margin-top: .3rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.holds { color: #15803d; font-weight: 600; } .missed { color: #b91c1c; font-weight: 600; }
.wide { overflow-x: auto; margin: 0 0 .75rem; }
.tables { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: start; }
.tables .wide { max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #475569; padding: 0 0 .25rem; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #e2e8f0;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 400; }
thead th { color: #475569; font-weight: 600; border-bottom-color: #94a3b8; }
.panels { display: flex; flex-wrap: wrap; align-items: start; gap: .75rem; margin: 0 0 .75rem; }
img { display: block; flex: 1 1 calc(.95 * var(--width)); min-width: 0; height: auto;
  max-width: min(100%, calc(1.25 * var(--width))); }
summary { cursor: pointer; color: #1d4ed8; margin: 0 0 .5rem; }
pre { overflow-x: auto; background: #f8fafc; padding: .75rem; font-size: .8rem; margin: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; margin: 0 0 1rem; }
.pair div { min-width: 0; } .pair pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.pair p { margin: 0 0 .25rem; font-size: .875rem; font-weight: 600; color: #475569; }
h3 { margin: 0 0 .25rem; font: 400 .8rem ui-monospace, monospace; color: #475569;
  overflow-wrap: anywhere; }
mark { background: #fde68a; }
li { overflow-wrap: anywhere; }
@media (max-width: 40rem) { section { padding: .75rem; } table { font-size: .78rem; }
  th, td { padding: .25rem .35rem; } dl, .pair { grid-template-columns: 1fr; gap: .1rem; }
  dd { margin-bottom: .5rem; } .pair div + div { margin-top: .5rem; } }
"""


def html_page(top: Top, sections: Iterable[Section], plots: Mapping[str, Sequence[str]]) -> str:
    """The page.

    Args:
        top: What stands on top of it.
        sections: What follows.
        plots: Panels as SVG text by the plot's name; a plot that is missing is left out.

    Returns:
        HTML that loads nothing: style and images are inside. All text is escaped.
    """
    body = "\n".join([*_top(top), *(_section(section, plots) for section in sections)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(top.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _top(top: Top) -> Iterator[str]:
    yield f"<h1>{escape(top.title)}</h1>"
    yield f'<p class="made">{escape(top.line)}</p>'
    points = "".join(
        f"<dt>{escape(point.label)}</dt><dd>{escape(point.text)}{_code(point.code)}</dd>\n"
        for point in top.points
    )
    tables = "\n".join(map(_table, top.tables))
    tables = f'<div class="tables">{tables}</div>'
    yield (
        f'<div class="{top.light}"><section class="verdict {top.outcome}">\n'
        f"<p><strong>{escape(top.headline)}</strong></p>\n"
        f"<dl>{points}</dl>\n{tables}\n</section></div>"
    )


def _section(section: Section, plots: Mapping[str, Sequence[str]]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        parts.append(f"<ul>{items}</ul>")
    parts += [_panels(plot, plots[plot.name]) for plot in section.plots if plot.name in plots]
    parts += map(_pair, section.pairs)
    for table in section.tables:
        shown = _table(Table(table.columns, table.rows)) if table.folded else _table(table)
        parts.append(_folded(table.caption, shown) if table.folded else shown)
    if section.code:
        parts.append(_folded(section.title, f"<pre>{escape(section.code)}</pre>"))
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _panels(plot: Plot, svgs: Sequence[str]) -> str:
    """Panels in a row, or below each other where the page is narrow: none is cut off."""
    images = []
    for i, svg in enumerate(svgs):
        data = base64.b64encode(svg.encode()).decode()
        text = escape(plot.text) if i == 0 else ""
        images.append(
            f'<img alt="{text}" style="--width: {_width(svg):.0f}px" '
            f'src="data:image/svg+xml;base64,{data}">'
        )
    return f'<div class="panels">{"".join(images)}</div>'


def _width(svg: str) -> float:
    """Width of an image in pixels."""
    found = re.search(r'width="([\d.]+)pt"', svg)
    assert found is not None
    return float(found[1]) * 4 / 3


def _folded(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{html}</details>"


def _code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text else ""


def _pair(pair: Pair) -> str:
    sides = "".join(
        f"<div><p>{name}</p><pre>{_from_difference(text, pair.common)}</pre></div>"
        for name, text in (("original", pair.original), ("quantized", pair.quantized))
    )
    return f'<h3>{escape(pair.caption)}</h3>\n<div class="pair">{sides}</div>'


def _from_difference(text: str, common: int) -> str:
    """A text with all of it marked from where it differs."""
    same, other = escape(text[:common]), escape(text[common:])
    return f"{same}<mark>{other}</mark>" if other else same


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.columns)
    rows = "\n".join(_row(row) for row in table.rows)
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(row: Cells) -> str:
    first, *others = (escape(cell) for cell in row)
    classes = {"holds": ' class="holds"', "MISSED": ' class="missed"'}
    cells = "".join(f"<td{classes.get(cell, '')}>{cell}</td>" for cell in others)
    return f'<tr><th scope="row">{first}</th>{cells}</tr>'
