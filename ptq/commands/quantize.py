"""`ptq quantize`: a model of one's own, without a recipe; it writes down the one that it ran.

    ptq quantize MODEL --scheme w4 [--data DATA] [--output DIR]
    ptq quantize organization/model --recipe w4_best --data rows.jsonl
    ptq quantize MODEL --budget kl=0.01 [--target cpu|gpu|vllm] [--scheme a8w4c8]
    ptq quantize MODEL --adapter FOLDER --scheme w4

It is `ptq run` on the shipped recipe that does best by the scheme, or on the one that is named,
with the model and the data put in. With a budget the bits of each group of layers are chosen: the
fewest bytes that lose no more, or the least loss of so many bytes. A scheme beside it says what
inputs and the cache are. What it ran is written to OUTPUT/recipe.yaml: `ptq run` on that
repeats it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from formats.command import CommandParser
from formats.errors import RecipeError
from formats.gguf.locate import locate_model
from formats.hub import is_hub_id
from ptq.commands import run
from ptq.commands.shared import add_quiet, add_settings
from ptq.recipe.budget import LIMITS, Target
from ptq.recipe.draft import Override
from ptq.recipe.own_model import (
    OTHER_NAMES,
    SCHEMES,
    default_output,
    preset_of,
    recipe_of,
    settings_for,
)
from ptq.recipe.reading import load_recipe

BUDGET = "budget"  # the shipped recipe that a budget alone stands for


def main(argv: Sequence[str] | None = None) -> int:
    """Quantize a model and report what it cost; 0 where its verdict is not red."""
    arguments = _parsed(argv)
    if not is_hub_id(arguments.model):
        locate_model(arguments.model, floats=True, progress=not arguments.quiet)
    settings = settings_for(
        arguments.model,
        data=arguments.data,
        revision=arguments.revision,
        adapter=arguments.adapter,
        given=[*_budget(arguments), *arguments.set],
    )
    recipe = arguments.recipe or (BUDGET if arguments.budget else recipe_of(arguments.scheme))
    data = load_recipe(recipe, settings).dataset.name
    words = [recipe]
    for setting in settings:
        words += ["--set", setting]
    label = arguments.budget or arguments.scheme or arguments.recipe
    output = arguments.output or default_output(arguments.model, label)
    words += ["--output", str(output), *(["--force"] if arguments.force else [])]
    words += ["--quiet"] if arguments.quiet else []
    if data == "stdlib":
        print("No --data: calibrated and measured on Python source, the standard library's.")
        print("Give --data FILE for text like that which the model will meet.")
    print(f"This is: {shlex.join(['ptq', 'run', *words])}")
    return run.main(words)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, of which some exclude each other."""
    made = parser()
    arguments = made.parse_args(argv)
    if arguments.recipe is not None and arguments.scheme is not None:
        made.error("argument --recipe: not allowed with argument --scheme")
    if arguments.target is not None and arguments.budget is None:
        made.error("argument --target: needs the argument --budget")
    if arguments.recipe is None and arguments.scheme is None and arguments.budget is None:
        made.error("one of the arguments --budget --scheme --recipe is required")
    return arguments


def _budget(arguments: argparse.Namespace) -> list[str]:
    """What a budget overrides in a recipe.

    Raises:
        RecipeError: it is no `name=value`.
    """
    if arguments.budget is None:
        return []
    name, equals, value = arguments.budget.partition("=")
    if not equals or name not in LIMITS:
        raise RecipeError(
            f"--budget {arguments.budget}: needed is a limit and its value, such as kl=0.01; "
            f"limits are {', '.join(LIMITS)}"
        )
    target = f", target: {arguments.target}" if arguments.target else ""
    scheme = [f"scheme={preset_of(arguments.scheme)}"] if arguments.scheme else []
    given = f"--budget {arguments.budget}"
    return [Override(f"budget={{{name}: {value}{target}}}", given), *scheme]


def _scheme(text: str) -> str:
    """A scheme's name on the command line; the error knows names of recipes, and close ones."""
    try:
        recipe_of(text)
    except RecipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text.lower()


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq quantize`."""
    made = CommandParser(
        prog="ptq quantize",
        description="Quantize a model without a recipe of your own, and report what it cost.",
        epilog="What was run is written to OUTPUT/recipe.yaml, which `ptq run` repeats. "
        "Exit codes: 0 as good as asked or known, 1 red: worse, 2 errors.",
    )
    made.add_argument(
        "model", metavar="MODEL", help="folder, .gguf file, or organization/model on the hub"
    )
    made.add_argument(
        "--scheme",
        type=_scheme,
        choices=[*SCHEMES, *OTHER_NAMES],
        metavar="SCHEME",
        help=f"what is quantized to how many bits: {', '.join(SCHEMES)}",
    )
    made.add_argument("--recipe", metavar="NAME", help="a name that `ptq recipes` lists, or a file")
    made.add_argument(
        "--budget",
        metavar="LIMIT",
        help="what may be lost or taken: kl=0.01, perplexity_ratio=1.01, bytes=2.5GB or bits=4.5",
    )
    made.add_argument(
        "--target",
        choices=get_args(Target),
        help="where a model with a budget is to run fast (default: cpu)",
    )
    made.add_argument(
        "--data",
        type=Path,
        metavar="DATA",
        help="text to calibrate and to measure on, half of it each: a .jsonl, .json, .csv, .tsv, "
        ".parquet, .arrow or .txt file, a folder of them, or a name of `datasets`; of a table the "
        "column whose name or shape tells that it holds text or chats (default: Python code)",
    )
    made.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a LoRA adapter of MODEL that PEFT saved: merged in first",
    )
    made.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    add_settings(made, output="default output/MODEL-SCHEME")
    made.add_argument("--force", action="store_true", help="replace an existing output")
    add_quiet(made)
    return made
