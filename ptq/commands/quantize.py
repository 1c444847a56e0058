"""`ptq quantize`: a model of one's own, without a recipe; it writes down the one that it ran.

    ptq quantize MODEL --scheme w4 [--data DATA] [--output DIR]
    ptq quantize organization/model --recipe w4_best --data rows.jsonl

It is `ptq run` on the shipped recipe that does best by the scheme, or on the one that is named,
with the model and the data put in. What it ran is written to OUTPUT/recipe.yaml: `ptq run` on that
repeats it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.hub import is_hub_id
from formats.stored.other_kinds import locate_model
from ptq.commands import run
from ptq.commands.arguments import add_quiet, add_settings
from ptq.recipe.own_model import OTHER_NAMES, SCHEMES, default_output, recipe_of, settings_for
from ptq.recipe.reading import load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Quantize a model and report what it cost; 0 where the recipe's thresholds hold."""
    arguments = parser().parse_args(argv)
    if not is_hub_id(arguments.model):
        locate_model(arguments.model)
    settings = settings_for(
        arguments.model, data=arguments.data, revision=arguments.revision, given=arguments.set
    )
    recipe = arguments.recipe or recipe_of(arguments.scheme)
    data = load_recipe(recipe, settings).dataset.name
    words = [recipe]
    for setting in settings:
        words += ["--set", setting]
    output = arguments.output or default_output(
        arguments.model, arguments.scheme or arguments.recipe
    )
    words += ["--output", str(output), *(["--force"] if arguments.force else [])]
    words += ["--quiet"] if arguments.quiet else []
    if data == "stdlib":
        print("No --data: calibrated and measured on Python source, the standard library's.")
        print("Give --data FILE for text like that which the model will meet.")
    print(f"This is: {shlex.join(['ptq', 'run', *words])}")
    return run.main(words)


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq quantize`."""
    made = CommandParser(
        prog="ptq quantize",
        description="Quantize a model without a recipe of your own, and report what it cost.",
        epilog="What was run is written to OUTPUT/recipe.yaml, which `ptq run` repeats. "
        "Exit codes: 0 thresholds hold, 1 thresholds missed, 2 errors.",
    )
    made.add_argument("model", metavar="MODEL", help="folder, or organization/model on the hub")
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--scheme",
        type=str.lower,
        choices=[*SCHEMES, *OTHER_NAMES],
        metavar="SCHEME",
        help=f"what is quantized to how many bits: {', '.join(SCHEMES)}",
    )
    what.add_argument("--recipe", metavar="NAME", help="a name that `ptq recipes` lists, or a file")
    made.add_argument(
        "--data",
        type=Path,
        metavar="DATA",
        help="text to calibrate and to measure on, half of it each: a .jsonl, .parquet, .arrow or "
        ".txt file, a folder of them, or a name of `datasets` (default: Python's own source)",
    )
    made.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    add_settings(made, output="default output/MODEL-SCHEME")
    made.add_argument("--force", action="store_true", help="replace an existing output")
    add_quiet(made)
    return made
