"""What commands share: arguments that take a recipe, and commands for a person to paste next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from formats.chat_template import brings_chat_template
from formats.namespace import later
from ptq.recipe.reading import output_override
from ptq.text import typed_path

with later():
    from formats.checkpoint import native
    from inference.server import command as serving


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


def next_commands(checkpoint: Path) -> list[str]:
    """What can be done with a checkpoint, quoted for a shell in the current directory."""
    folder = typed_path(checkpoint)
    commands = [
        ["predict", folder, "--prompt", "def add(a, b):"],
        ["inspect", folder],
        ["bench", folder],
        *([["chat", folder]] if brings_chat_template(checkpoint) else []),
    ]
    pasted = [shlex.join(["ptq", *words]) for words in commands]
    installed = [serving.INSTALL] if serving.missing_extra() else []
    return [*pasted, *installed, shlex.join(["ptq", "serve", folder])]


def checkpoint_lines(checkpoint: Path) -> list[str]:
    """Where a checkpoint is, and, where it is so, that no other software opens it."""
    reason = native.said_in_card(checkpoint)
    return [f"checkpoint: {typed_path(checkpoint)}", *([f"note: {reason}"] if reason else [])]


def forced_command(recipe: Path, overrides: Sequence[str], output: Path | None) -> str:
    """The same run with --force, quoted for a shell."""
    words = ["ptq", "run", str(recipe)]
    for override in overrides:
        words += ["--set", override]
    words += ["--output", str(output)] if output is not None else []
    return shlex.join([*words, "--force"])
