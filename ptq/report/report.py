"""What the quantization cost, measured on the real kernels: one HTML file, Markdown and JSON.

Both models run in this project's engine: the original as it is, the quantized one with its
integer kernels and its quantized cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate.data import TokenSet
from formats.files import building_directory, write_bytes
from inference.bench.figures import environment
from inference.engine import Engine
from ptq.evaluate.comparison import engine_config
from ptq.output import REPORT_FOLDER
from ptq.peers.measure import PeersRecord, measure_peers
from ptq.plan.plan import Plan
from ptq.plan.preflight import read_data
from ptq.report.advice import Advice, advise, shares_of, weakest
from ptq.report.attribution import Attribution
from ptq.report.data import ReportData
from ptq.report.measure import measure
from ptq.report.page import Point, Section, Table, Top, drawn, html_page, markdown_page
from ptq.report.parts import accuracy, loss, run
from ptq.report.verdict import check_rows, strange_original, summary_rows, verdict_of
from ptq.result import CalibrationSummary, QuantizationResult
from ptq.search.search import Ordered

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
    if doubt := strange_original(data.accuracy):
        parts.append(f"Careful: {doubt}.")
    shares = shares_of(data)
    if len(shares) > 1:
        kind, share = next(iter(shares.items()))
        parts.append(f"{share:.0%} of the loss comes from {kind}.")
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
        yield run.budget_section(data.budget)
    yield accuracy.perplexity_section(data)
    yield accuracy.divergence_section(data)
    yield loss.loss_section(data)
    if data.tasks:
        yield accuracy.tasks_section(data)
    if data.completions:
        yield accuracy.completions_section(data)
    if data.peers:
        yield accuracy.peers_section(data)
    yield loss.layers_section(data)
    if data.quantization.smoothing or data.outliers:
        yield loss.activations_section(data)
    if data.kv_scales:
        yield loss.cache_section(data)
    yield run.size_and_speed_section(data)
    yield run.run_section(data)
    yield run.scales_section(data)
    yield run.provenance_section(data)
    yield run.recipe_section(data)


def draw_plots(data: ReportData) -> dict[str, tuple[str, ...]]:
    """Every plot that the data allow, by the name that sections use: its panels as SVG."""
    return drawn(sections(data))


@dataclass(frozen=True)
class Report:
    """Outcome of a report.

    Attributes:
        passed: Whether every threshold of the recipe holds.
        summary_rows: Head and rows of the table that a run ends with.
        line: Verdict and advice in a line.
        change_first: The command that the advice stands for where the verdict is not green, or "".
        folder: Where report.html, report.md and report.json lie.
    """

    passed: bool
    failures: tuple[str, ...]
    summary_rows: tuple[tuple[str, ...], ...]
    line: str
    change_first: str
    folder: Path
    data: ReportData


def make_report(
    result: QuantizationResult,
    plan: Plan,
    evaluation: TokenSet | None = None,
    *,
    ordered: Ordered | None = None,
    progress: bool = True,
) -> Report:
    """Compare a quantized checkpoint with its original, and write the report beside it.

    Arguments as of `ptq.report.measure.measure`; the plan's recipe says where the output is.

    Raises:
        CheckpointError: the report cannot be written; others as of `measure`.
    """
    data = measure(result, plan, evaluation, ordered=ordered, progress=progress)
    folder = plan.recipe.output.path / REPORT_FOLDER
    write_report(data, folder)
    rows = tuple(summary_rows(data))
    line, command = in_a_line(data), change_first(data)
    return Report(data.passed, data.failures, rows, line, command, folder, data)


def measure_only_peers(plan: Plan, *, progress: bool = True) -> PeersRecord:
    """Compare the peers of a plan's recipe with its model, without a run of our own.

    Raises:
        RecipeError: the data cannot be used.
        CheckpointError: the model is damaged.
    """
    recipe = plan.recipe
    calibration, evaluation = read_data(recipe).values()
    original = Engine.from_pretrained(recipe.model.folder, config=engine_config(evaluation, None))
    return PeersRecord(
        model=plan.model,
        calibration=CalibrationSummary.of(calibration),
        evaluation=CalibrationSummary.of(evaluation),
        environment=environment(),
        peers=measure_peers(recipe, original, calibration, evaluation, progress=progress),
    )


def write_report(data: ReportData, folder: Path) -> None:
    """Write report.html, report.md and report.json; the folder is replaced at once or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    page = render_html(data, draw_plots(data))
    with building_directory(folder, replace=True) as temporary:
        write_bytes(temporary / "report.html", page.encode())
        write_bytes(temporary / "report.md", render_markdown(data).encode())
        write_bytes(temporary / "report.json", (data.model_dump_json(indent=1) + "\n").encode())
