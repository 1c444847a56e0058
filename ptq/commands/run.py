"""`ptq run`: from a recipe to a quantized checkpoint and a report of what it cost.

    ptq run recipes/a8w8c8.yaml [--set KEY=VALUE]... [--output DIR] [--force]

Exit codes: 0 where the thresholds of the recipe hold, or, where it has none, the run loses no more
than its scheme is known to lose on a model of its size and family; 1 where not (red), 2 for errors.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.errors import RecipeError
from formats.files import output_locked
from formats.hub import hide_progress
from formats.namespace import later, require_own_packages
from ptq.commands.shared import (
    add_quiet,
    add_recipe_arguments,
    checkpoint_lines,
    forced_command,
    next_commands,
    overrides_of,
)
from ptq.output import RECIPE_FILE, REPORT_FOLDER, is_taken
from ptq.recipe.reading import LoadedRecipe, read_recipe
from ptq.text import format_table, typed_path

with later():
    import ptq.plan.plan as planning
    import ptq.report.report as reporting
    from ptq import result as results
    from ptq.certify import measuring as certifying
    from ptq.convert import convert as converting
    from ptq.evaluate import comparison
    from ptq.pipeline import driver, resume
    from ptq.plan import preflight
    from ptq.search import choice
    from ptq.search import search as searching


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; 0 where its verdict is not red, 1 where it is."""
    arguments = parser().parse_args(argv)
    if arguments.quiet:
        hide_progress()
    loaded = read_recipe(arguments.recipe, overrides_of(arguments))
    with output_locked(loaded.recipe.output.path):
        _refuse_taken(arguments, loaded)
        return _run(arguments, loaded.pinned())


def _run(arguments: argparse.Namespace, loaded: LoadedRecipe) -> int:
    """Quantize, compare, and say where it all is."""
    require_own_packages("inference")
    output = loaded.recipe.output.path
    plan = planning.plan_recipe(loaded, force=arguments.force)
    watch = results.Stopwatch()
    with watch.phase("data"):  # of both splits: a fault of the second shows before hours of work
        data = preflight.read_data(plan.recipe)
    for line in preflight.describe_data(plan.recipe, data):
        print(line)
    force, progress = arguments.force, not arguments.quiet
    make_report = reporting.make_report  # imported now: what it lacks shows before hours of work
    with resume.telling_what_is_kept(output):
        ordered = None
        if plan.recipe.budget is not None:
            ordered = searching.search(loaded, data, progress=progress)
            plan, result = ordered.plan, ordered.result
        else:
            result = driver.quantize_tokens(
                plan, data["calibration"], force=force, progress=progress, keep=True, watch=watch
            )
        others = converting.write_beside(result, plan.recipe.output, progress=progress)
        shutil.rmtree(output / REPORT_FOLDER, ignore_errors=True)  # it tells of the run before
        report = make_report(result, plan, data["evaluation"], ordered=ordered, progress=progress)
    resume.discard(output)
    print()
    print(format_table(report.summary_rows))
    print()
    if ordered is not None:
        print(f"{format_table(choice.choice_rows(ordered.record))}\n")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    print(f"verdict:    {report.line}")
    print(*checkpoint_lines(result.checkpoint), *others, sep="\n")
    print(f"report:     {typed_path(report.folder / 'report.html')}")
    print(f"recipe:     {typed_path(output / RECIPE_FILE)} (every setting; `ptq run` repeats it)")
    red = not report.passed
    if (level := plan.recipe.report.certificate) is not None:
        original, where = plan.recipe.model.folder, comparison.report_devices(plan.recipe)[0]
        found = certifying.certify(
            result.checkpoint, original, level=level, device=where, progress=progress
        )
        print(f"certified:  {found.headline}")
        red = red or found.verdict == "red"
    print("\nNext:")
    first = [report.change_first] if report.change_first else []
    for command in (*first, *next_commands(result.checkpoint)):
        print(f"  {command}")
    if shutil.which("ptq") is None:
        print("(`ptq` is not on the path here; `python -m ptq` stands for it)")
    return 1 if red else 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq run`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(
        prog="ptq run",
        description=summary,
        epilog="Exit codes: 0 as good as asked or known, 1 red: worse, 2 errors.",
    )
    add_recipe_arguments(made)
    made.add_argument("--force", action="store_true", help="replace an existing output")
    add_quiet(made)
    return made


def _refuse_taken(arguments: argparse.Namespace, loaded: LoadedRecipe) -> None:
    """Refuse an output that exists; one that holds the model is refused later, with --force too.

    Raises:
        RecipeError: it may not be replaced.
    """
    output, model = loaded.recipe.output.path, loaded.recipe.model.path
    if Path(model).resolve().is_relative_to(output.resolve()):
        return
    if is_taken(output) and output.is_dir() and not arguments.force:
        again = forced_command(arguments.recipe, arguments.set, arguments.output)
        raise RecipeError(
            f"{typed_path(output)} exists already. Replace it with\n  {again}\n"
            "or give another folder with --output"
        )
