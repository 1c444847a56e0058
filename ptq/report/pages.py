"""The report's pages: what stands on top, the sections in their order, and their plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ptq.report.advice import Advice, advise, shares_of, weakest
from ptq.report.data import ReportData
from ptq.report.measured.attribution import Attribution
from ptq.report.page.page import Point, Section, Table, Top, drawn, html_page, markdown_page
from ptq.report.parts.accuracy import (
    completions_section,
    divergence_section,
    perplexity_section,
    tasks_section,
)
from ptq.report.parts.activations import activations_section
from ptq.report.parts.budget import budget_section
from ptq.report.parts.loss import cache_section, layers_section, loss_section
from ptq.report.parts.peers import peers_section
from ptq.report.parts.run import (
    provenance_section,
    recipe_section,
    run_section,
    scales_section,
    size_and_speed_section,
)
from ptq.report.verdict import check_rows, summary_rows, verdict_of

CHANGE_FIRST = "Change first"


def render_html(data: ReportData, plots: Mapping[str, Sequence[str]]) -> str:
    """The page as HTML; `plots` are SVG texts by name, from `draw_plots`."""
    return html_page(top_of(data), sections(data), plots)


def render_markdown(data: ReportData) -> str:
    """The same as Markdown, without the plots."""
    return markdown_page(top_of(data), sections(data))


def top_of(data: ReportData) -> Top:
    """Verdict, answers and figures on top of the page."""
    verdict = verdict_of(data)
    limit = "Threshold" if data.known is None else "Known"
    head, *rows = summary_rows(data)
    tables = (*([check_rows(data)] if data.checks else ()), Table(head, rows))
    return Top(
        title=data.title,
        line=data.provenance.line(),
        outcome=verdict.outcome,
        light=verdict.light,
        headline=verdict.headline,
        points=(
            *(Point(limit, f"{margin}.") for margin in verdict.margins),
            *(Point("Careful", f"{doubt}.") for doubt in verdict.doubts),
            *_where(data),
            *(
                Point(label, _advice_text(advice), advice.command)
                for label, advice in answers(data)
            ),
        ),
        tables=tables,
    )


def in_a_line(data: ReportData) -> str:
    """Verdict and advice for a terminal, such as `Green: every threshold holds. ...`."""
    parts = [verdict_of(data).headline]
    shares = shares_of(data)
    if len(shares) > 1:
        kind, share = next(iter(shares.items()))
        parts.append(f"{kind}: {share:.0%} of the loss.")
    parts += [f"{label}: {a.recipe}." for label, a in answers(data) if a.recipe]
    return " ".join(parts)


def answers(data: ReportData) -> list[tuple[str, Advice]]:
    """What to try next, by what it serves; of a run that is red or amber, what to change first."""
    if verdict_of(data).light in ("red", "amber"):
        return [(CHANGE_FIRST, advise(data, save=False))]
    return [
        ("To lose less", advise(data, save=False)),
        ("To save more", advise(data, save=True)),
    ]


def change_first(data: ReportData) -> str:
    """The command of what to change first, if a run is red or amber; "" where there is none."""
    (label, advice), *_ = answers(data)
    return advice.command if label == CHANGE_FIRST else ""


def _advice_text(advice: Advice) -> str:
    return f"{advice.recipe}: {advice.reason}." if advice.recipe else f"{advice.reason}."


def _where(data: ReportData) -> Iterator[Point]:
    """Where the loss comes from, and the weakest layers."""
    shares, found = shares_of(data), data.attribution
    if shares and isinstance(found, Attribution):
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
        total = sum(part.kl for part in found.blocks)
        worst = max(found.blocks, key=lambda part: part.kl)
        share = f", {worst.kl / total:.0%} of what blocks lose one by one" if total else ""
        yield Point("Loss comes from", f"{kinds}. Most in {worst.name}{share}.")
    rows = weakest(data)
    if rows:
        layers = ", ".join(f"{name} ({ratio:.1f} dB)" for name, ratio in rows)
        yield Point("Weakest layers", f"{layers}: signal over quantization noise.")


def sections(data: ReportData) -> Iterator[Section]:
    """Everything below the verdict, in order."""
    if data.budget is not None:
        yield budget_section(data.budget)
    yield perplexity_section(data)
    yield divergence_section(data)
    yield loss_section(data)
    if data.tasks:
        yield tasks_section(data)
    if data.completions:
        yield completions_section(data)
    if data.peers:
        yield peers_section(data)
    yield layers_section(data)
    if data.quantization.smoothing or data.outliers:
        yield activations_section(data)
    if data.kv_scales:
        yield cache_section(data)
    yield size_and_speed_section(data)
    yield run_section(data)
    yield scales_section(data)
    yield provenance_section(data)
    yield recipe_section(data)


def draw_plots(data: ReportData) -> dict[str, tuple[str, ...]]:
    """Every plot that the data allow, by the name that sections use: its panels as SVG."""
    return drawn(sections(data))
