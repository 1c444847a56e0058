"""`ptq check`: holds a recipe against its model and its data, and shows what a run would do.

Nothing is written and no weight is read; it takes seconds on a model of any size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ptq.commands.arguments import add_recipe_arguments, overrides_of
from ptq.plan.describe import describe_plan
from ptq.plan.plan import plan_recipe
from ptq.plan.preflight import read_data
from ptq.recipe.schema import read_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Check a recipe and print its plan; 0 where it would run."""
    parser = argparse.ArgumentParser(prog="ptq check", description=(__doc__ or "").split("\n\n")[0])
    add_recipe_arguments(parser)
    arguments = parser.parse_args(argv)
    plan = plan_recipe(read_recipe(arguments.recipe, overrides_of(arguments)), force=True)
    print("\n".join(describe_plan(plan, read_data(plan.recipe))))
    return 0
