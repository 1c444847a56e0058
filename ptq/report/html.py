"""The report as one HTML file that needs nothing else, and as Markdown."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape

from ptq.report.data import ReportData
from ptq.report.sections import sections
from ptq.report.summary import Cells, Section, Table, check_rows, summary_rows

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
p { margin: 0 0 .75rem; max-width: 48rem; color: #334155; }
.verdict { border-left: .5rem solid; }
.verdict strong { font-size: 1.25rem; }
.passed { border-left-color: #15803d; } .passed strong { color: #15803d; }
.failed { border-left-color: #b91c1c; } .failed strong { color: #b91c1c; }
.open { border-left-color: #64748b; }
.holds { color: #15803d; font-weight: 600; } .missed { color: #b91c1c; font-weight: 600; }
.wide { overflow-x: auto; margin: 0 0 .75rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #475569; padding: 0 0 .25rem; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #e2e8f0;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; font-weight: 400; }
thead th { color: #475569; font-weight: 600; border-bottom-color: #94a3b8; }
img { display: block; width: 100%; min-width: 34rem; height: auto; }
summary { cursor: pointer; color: #1d4ed8; margin: 0 0 .5rem; }
pre { overflow-x: auto; background: #f8fafc; padding: .75rem; font-size: .8rem; margin: 0; }
li { overflow-wrap: anywhere; }
@media (max-width: 36rem) { section { padding: .75rem; } table { font-size: .78rem; }
  th, td { padding: .25rem .35rem; } }
"""
PLOTS = {
    "perplexity": "Perplexity of both models and their ratio, with intervals",
    "peers": "Perplexity ratio and mean KL divergence of this run and of other tools",
    "divergence": "KL divergence: percentiles, mean by position, and top-1 agreement by position",
    "layers": "Heat maps of the output SQNR of every layer",
    "activations": "Magnitudes of the layers' inputs, and smoothing strengths, by block",
    "cache": "Heat maps of the cache's scales by layer and head",
    "sizes": "Bars of sizes and speeds of both models",
}


def render_html(data: ReportData, plots: Mapping[str, str]) -> str:
    """The page.

    Args:
        data: What was measured.
        plots: SVG text by name, from `ptq.report.plots.draw_plots`.

    Returns:
        HTML that loads nothing: style and images are inside. All text is escaped.
    """
    body = "\n".join(
        [
            f"<h1>{escape(data.title)}</h1>",
            f'<p class="made">{escape(data.provenance.line())}</p>',
            _verdict(data),
            *(_section(section, plots) for section in sections(data)),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(data.title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _verdict(data: ReportData) -> str:
    kind, word = verdict(data)
    head, *rows = summary_rows(data)
    checks = _table(check_rows(data)) if data.checks else ""
    return (
        f'<section class="verdict {kind}">\n<p><strong>{word}</strong></p>\n'
        f"{checks}\n{_table(Table(head, rows))}\n</section>"
    )


def verdict(data: ReportData) -> tuple[str, str]:
    """(class, sentence) of the outcome."""
    if not data.checks:
        return "open", "The recipe sets no thresholds."
    if data.passed:
        return "passed", "Passed: every threshold holds."
    return "failed", f"Failed: {len(data.failures)} of {len(data.checks)} thresholds missed."


def _section(section: Section, plots: Mapping[str, str]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        parts.append(f"<ul>{items}</ul>")
    for name in section.plots:
        if name in plots:
            image = base64.b64encode(plots[name].encode()).decode()
            parts.append(
                f'<div class="wide"><img alt="{escape(PLOTS[name])}" '
                f'src="data:image/svg+xml;base64,{image}"></div>'
            )
    for table in section.tables:
        if table.folded:
            parts.append(
                f"<details><summary>{escape(table.caption)}</summary>\n"
                f"{_table(Table(table.columns, table.rows))}</details>"
            )
        else:
            parts.append(_table(table))
    if section.code:
        parts.append(
            f"<details><summary>{escape(section.title)}</summary>\n"
            f"<pre>{escape(section.code)}</pre></details>"
        )
    return "<section>\n" + "\n".join(parts) + "\n</section>"


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


def render_markdown(data: ReportData) -> str:
    """The same as text: verdict, tables and explanations, without the plots."""
    head, *rows = summary_rows(data)
    parts = [f"# {_plain(data.title)}", _plain(data.provenance.line()), verdict(data)[1]]
    if data.checks:
        parts.append(_markdown_table(check_rows(data)))
    parts.append(_markdown_table(Table(head, rows)))
    for section in sections(data):
        parts += [f"## {section.title}", section.text]
        if section.notes:
            parts.append("\n".join(f"- {_plain(note)}" for note in section.notes))
        for table in section.tables:
            parts += [f"{table.caption}:"] if table.caption else []
            parts.append(_markdown_table(table))
        if section.code:
            parts.append(f"```yaml\n{section.code.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines: Iterator[Cells] = iter((table.columns, *table.rows))
    first = _markdown_row(next(lines))
    rule = "|---|" + "---:|" * (len(table.columns) - 1)
    return "\n".join([first, rule, *map(_markdown_row, lines)])


def _markdown_row(cells: Cells) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = escape(text, quote=False)
    return "".join(f"\\{char}" if char in "|`*_[]\\" else char for char in text).replace("\n", " ")
