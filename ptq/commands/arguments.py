"""The arguments of commands that take a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from ptq.recipe.reading import output_override


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of all commands that take a recipe."""
    parser.add_argument("recipe", type=Path, help="YAML file, or a name of `ptq recipes`")
    add_settings(parser, output="overrides output.path")


def add_settings(parser: argparse.ArgumentParser, *, output: str) -> None:
    """What overrides a recipe's settings; `output` tells what --output does."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, such as dataset.calibration.samples=128; may be repeated",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Whether progress is shown."""
    parser.add_argument("--quiet", action="store_true", help="show no progress, only the result")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """What the arguments of `add_recipe_arguments` override in the recipe."""
    return [*arguments.set, *output_override(arguments.output)]
