"""`ptq report`: what the quantization cost, measured on the real kernels.

    ptq report OUTPUT

`ptq run` ends with the same. Both models run in this project's engine: the original as it is, the
quantized one with its integer kernels and its quantized cache. The report is in OUTPUT/report as
one HTML file, as Markdown and as JSON. Exit codes: as of `ptq run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.files import output_locked
from formats.namespace import later
from ptq.commands.shared import add_quiet
from ptq.output import RECIPE_FILE, require_run
from ptq.recipe.reading import output_override, read_recipe
from ptq.text import format_table, typed_path

with later():
    import ptq.plan.plan as planning
    import ptq.report.report as reporting
    from ptq import result as results


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq report`."""
    made = CommandParser(
        prog="ptq report",
        description="Measure a finished run again and write its report.",
        epilog="Exit codes: 0 as good as asked or known, 1 red: worse, 2 errors.",
    )
    made.add_argument("output", type=Path, help="output folder of a finished `ptq run`")
    add_quiet(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a finished run again; 0 where its verdict is not red, 1 where it is."""
    arguments = parser().parse_args(argv)
    output: Path = arguments.output
    require_run(output)
    with output_locked(output):
        return _report(output, not arguments.quiet)


def _report(output: Path, progress: bool) -> int:
    result = results.load_result(output)
    here = output_override(output)  # it may have been moved since
    plan = planning.plan_recipe(read_recipe(output / RECIPE_FILE, here), force=True, solves=False)
    report = reporting.make_report(result, plan, progress=progress)
    print()
    print(format_table(report.summary_rows))
    print()
    for text in report.failures:
        print(f"FAILED: {text}")
    print(f"verdict: {report.line}")
    print(f"report: {typed_path(report.folder / 'report.html')}")
    return 0 if report.passed else 1
