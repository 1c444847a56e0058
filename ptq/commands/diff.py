"""`ptq diff`: what differs between two recipes, or between two checkpoints.

    ptq diff A.yaml B.yaml
    ptq diff CHECKPOINT_A CHECKPOINT_B [--top N]

Recipes are compared as they resolve, with bases, presets and defaults spelled out. Checkpoints are
compared by scheme, by the tensors that they hold, and by their scales. Exit code 0 where nothing
differs, 1 where something does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser, count
from formats.errors import RequestError
from formats.hub import near_folder
from formats.namespace import later
from ptq.recipe.own_model import find_recipe
from ptq.report import differences

with later():
    from formats.checkpoint import read


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq diff`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq diff", description=summary)
    made.add_argument("a", type=Path, help="recipe or folder of a checkpoint")
    made.add_argument("b", type=Path, help="recipe or folder to compare it with")
    made.add_argument("--top", type=count, default=10, help="tensors listed of each kind")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; 0 where nothing does, 1 where something does."""
    arguments = parser().parse_args(argv)
    if _are_folders(arguments.a, arguments.b):
        a, b = (read.Checkpoint.open(path) for path in (arguments.a, arguments.b))
        lines = differences.diff_checkpoints(a, b, arguments.top)
    else:
        lines = differences.diff_recipes(arguments.a, arguments.b)
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


def _are_folders(a: Path, b: Path) -> bool:
    """Whether two checkpoints are compared, and not two recipes.

    Raises:
        RequestError: neither.
    """
    folders = [path for path in (a, b) if path.is_dir()]
    if len(folders) != 1:
        return bool(folders)
    other = b if a.is_dir() else a
    if not find_recipe(other).exists():
        raise RequestError(f"{other}: no such folder; {near_folder(other)}give two checkpoints")
    raise RequestError(
        f"{folders[0]} is a folder and {other} is not. Give two recipes, or the folders of two "
        "checkpoints"
    )
