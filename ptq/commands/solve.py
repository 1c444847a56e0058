"""`ptq solve`: another checkpoint from the statistics of a finished run, without running the model.

    ptq solve output/a8w8c8 --set methods.0.smoothquant.alpha=0.95 --output output/again
    ptq solve output/mine --recipe w8_rtn --output output/w8

The run's own recipe is taken, or another one for the same model and data, with overrides. A shipped
recipe is taken for the model and the data of the run, whatever it names itself. Other observers,
granularities and schemes, another fixed alpha and, where the run kept Hessians, GPTQ and searched
scales follow from the statistics. Of a method that searches by the output of the block (strengths
of smoothing, clipping), what the run found is taken, if it has the options of the run; a search
with other options needs samples and is refused.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.errors import RecipeError
from formats.files import output_locked, refuse_busy
from formats.namespace import later
from ptq.commands.shared import add_quiet, checkpoint_lines, next_commands
from ptq.output import RECIPE_FILE, require_run
from ptq.recipe.own_model import is_shipped
from ptq.recipe.reading import LoadedRecipe, output_override, read_recipe
from ptq.text import typed_path

with later():
    import ptq.plan.plan as planning
    from ptq.pipeline import artifact, driver, reuse


def main(argv: Sequence[str] | None = None) -> int:
    """Solve again; 0 where a checkpoint was written."""
    arguments = parser().parse_args(argv)
    loaded = _read(arguments)
    with output_locked(loaded.recipe.output.path):
        return _solve(arguments, loaded)


def _solve(arguments: argparse.Namespace, loaded: LoadedRecipe) -> int:
    plan = planning.plan_recipe(loaded, force=arguments.force)
    if arguments.run.resolve() != loaded.recipe.output.path.resolve():
        refuse_busy(arguments.run)
    seen = artifact.Artifact.load(arguments.run)
    result = driver.solve(plan, seen, force=arguments.force, progress=not arguments.quiet)
    for note in reuse.solve_notes(seen, plan.recipe):
        print(note)
    print(*checkpoint_lines(result.checkpoint), sep="\n")
    print(f"solved in {result.seconds['total']:.1f} s, without running the model\n\nNext:")
    print(f"  {shlex.join(['ptq', 'report', typed_path(loaded.recipe.output.path)])}")
    for command in next_commands(result.checkpoint):
        print(f"  {command}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq solve`."""
    made = CommandParser(prog="ptq solve", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("run", type=Path, help="output folder of a finished run")
    made.add_argument(
        "--recipe",
        type=Path,
        help="a shipped recipe's name, or a file for the same model and data (default: the run's)",
    )
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--output", type=Path, required=True, metavar="DIR")
    made.add_argument("--force", action="store_true", help="replace an existing output")
    add_quiet(made)
    return made


def _read(arguments: argparse.Namespace) -> LoadedRecipe:
    """The recipe to solve.

    Raises:
        RecipeError: it is invalid, or asks for other data than the run saw.
        CheckpointError: there is no such run.
    """
    require_run(arguments.run)
    own = arguments.run / RECIPE_FILE
    run = read_recipe(own).recipe
    shipped = arguments.recipe is not None and is_shipped(arguments.recipe)
    same = ("model", "dataset") if shipped else ()  # are the run's, whatever it names itself
    overrides = [
        *(f"{key}={getattr(run, key).model_dump_json()}" for key in same),
        *arguments.set,
        *output_override(arguments.output),
    ]
    loaded = read_recipe(arguments.recipe or own, overrides)
    asked, seen = loaded.recipe.dataset, run.dataset
    differ = [
        name
        for name in type(seen).model_fields
        if name != "evaluation" and getattr(asked, name) != getattr(seen, name)
    ]
    if differ:
        raise RecipeError(
            f"dataset: {', '.join(differ)} differ from those of {typed_path(arguments.run)}, whose "
            "statistics are to be used; leave the data as they were, or run the recipe"
        )
    return loaded
