"""`ptq recipes`: the recipes that come with ptq, each with its scheme and what it is for.

    ptq recipes [--json]
    ptq recipes a8w8c8 > mine.yaml

The second prints a recipe's file, to start one of your own from. Every command that takes a recipe
takes these names from any folder, and so does `base:` in a recipe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from formats.command import CommandParser
from formats.errors import RequestError, suggestion
from ptq.recipe.own_model import ShippedRecipe, shipped_paths, shipped_recipes


def main(argv: Sequence[str] | None = None) -> int:
    """List the shipped recipes, or print one."""
    made = parser()
    arguments = made.parse_args(argv)
    if arguments.json and arguments.recipe:
        made.error("--json belongs to the list, without NAME")
    if arguments.recipe is not None:
        print(_text(arguments.recipe), end="")
    elif arguments.json:
        rows = [recipe._asdict() | {"path": str(recipe.path)} for recipe in shipped_recipes()]
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(_table(shipped_recipes())))
        print("\n`ptq recipes NAME` prints one. `ptq run NAME` runs it on the model that comes")
        print("with ptq, `ptq quantize MODEL --recipe NAME` on yours.")
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq recipes`."""
    made = CommandParser(
        prog="ptq recipes", description="List the recipes that come with ptq, or print one."
    )
    made.add_argument("recipe", nargs="?", metavar="NAME", help="print this recipe's file")
    made.add_argument("--json", action="store_true", help="the list as JSON")
    return made


def _table(recipes: Sequence[ShippedRecipe]) -> list[str]:
    rows = [("recipe", "scheme", "what for"), *(recipe[:3] for recipe in recipes)]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{name:<{first}}  {scheme:<{second}}  {purpose}" for name, scheme, purpose in rows]


def _text(name: str) -> str:
    """The file of a shipped recipe.

    Raises:
        RequestError: there is none of that name.
    """
    paths = shipped_paths()
    if name not in paths:
        raise RequestError(f"no shipped recipe {name!r}; {suggestion(name, paths)}")
    return paths[name].read_text(encoding="utf-8")
