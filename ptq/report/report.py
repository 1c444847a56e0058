"""What the quantization cost, measured on the real kernels.

Both models run in this project's engine: the original as it is, the quantized one with its
integer kernels and its quantized cache. The report is one HTML file, Markdown and JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calibrate.data import TokenSet, load_tokens
from formats.files import building_directory, write_bytes
from formats.tokenizer import load_tokenizer
from inference.bench.figures import environment
from inference.engine import Engine
from ptq.output import REPORT_FOLDER
from ptq.peers.measure import PeersRecord, measure_peers
from ptq.plan.plan import Plan
from ptq.report.data import ReportData
from ptq.report.measure import engine_config, measure
from ptq.report.pages import change_first, draw_plots, in_a_line, render_html, render_markdown
from ptq.report.verdict import summary_rows
from ptq.result import CalibrationSummary, QuantizationResult
from ptq.search.search import Ordered


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
    tokenizer = load_tokenizer(recipe.model.folder)
    calibration = load_tokens(recipe.dataset, tokenizer, "calibration")
    evaluation = load_tokens(recipe.dataset, tokenizer, "evaluation")
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
