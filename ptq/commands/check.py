"""`ptq check`: holds a recipe against its model and its data, and shows what a run would do.

Nothing is written. To predict how long the run will take, its first block is solved, by a few steps
of `refine`; that may take minutes of a large model. With --no-time no weight is read, and it takes
seconds whatever the size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from formats.command import CommandParser
from formats.namespace import later
from ptq.commands.shared import add_recipe_arguments, overrides_of
from ptq.recipe.reading import read_recipe

with later():
    import ptq.plan.plan as planning
    from ptq.pipeline import timing
    from ptq.plan import describe, preflight


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq check`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq check", description=summary)
    add_recipe_arguments(made)
    made.add_argument("--no-time", action="store_true", help="solve no block to tell the time")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Check a recipe and print its plan; 0 where it would run."""
    arguments = parser().parse_args(argv)
    loaded = read_recipe(arguments.recipe, overrides_of(arguments)).pinned()
    plan = planning.plan_recipe(loaded, force=True)
    data = preflight.read_data(plan.recipe)
    print("\n".join(describe.describe_plan(plan, data)))
    if not arguments.no_time:
        print(
            f"timing the first of {len(plan.blocks)} blocks (--no-time skips it)", file=sys.stderr
        )
        print(describe.describe_seconds(timing.predict_seconds(plan, data["calibration"])))
    return 0
