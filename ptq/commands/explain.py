"""`ptq explain`: what a recipe does to each module, step by step; reads headers only.

ptq explain RECIPE [--set KEY=VALUE]... [--module PATTERN]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from formats.command import CommandParser
from formats.namespace import later
from ptq.commands.shared import add_recipe_arguments, overrides_of
from ptq.recipe.reading import read_recipe

with later():
    import ptq.plan.plan as planning
    from ptq.plan import describe


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq explain`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq explain", description=summary)
    add_recipe_arguments(made)
    made.add_argument("--module", metavar="PATTERN", help="only modules like this")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print what happens to each module."""
    arguments = parser().parse_args(argv)
    loaded = read_recipe(arguments.recipe, overrides_of(arguments)).pinned()
    plan = planning.plan_recipe(loaded, force=True, solves=False)
    print("\n".join(describe.explain(plan, arguments.module)))
    return 0
