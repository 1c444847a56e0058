"""`ptq explain`: what a recipe does to each module, step by step; reads headers only.

ptq explain RECIPE [--set KEY=VALUE]... [--module PATTERN]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ptq.commands.arguments import add_recipe_arguments, overrides_of
from ptq.plan.explain import explain
from ptq.plan.plan import plan_recipe
from ptq.recipe.reading import read_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Print what happens to each module."""
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="ptq explain", description=summary)
    add_recipe_arguments(parser)
    parser.add_argument("--module", metavar="PATTERN", help="only modules like this")
    arguments = parser.parse_args(argv)
    loaded = read_recipe(arguments.recipe, overrides_of(arguments))
    plan = plan_recipe(loaded, force=True)
    print("\n".join(explain(plan, arguments.module)))
    return 0
