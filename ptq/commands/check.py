"""`ptq check`: holds a recipe against its model and its data, and shows what a run would do.

Nothing is written. To tell how long the run would take, its first block is solved, which may take
minutes of a large model; with --no-time no weight is read, and it takes seconds whatever the size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from calibrate.data import TokenSet
from ptq.commands.arguments import add_recipe_arguments, overrides_of
from ptq.pipeline.timing import predict_seconds
from ptq.plan.describe import describe_plan, describe_seconds
from ptq.plan.plan import Plan, plan_recipe
from ptq.plan.preflight import read_data
from ptq.recipe.reading import read_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Check a recipe and print its plan; 0 where it would run."""
    parser = argparse.ArgumentParser(prog="ptq check", description=(__doc__ or "").split("\n\n")[0])
    add_recipe_arguments(parser)
    parser.add_argument("--no-time", action="store_true", help="solve no block to tell the time")
    arguments = parser.parse_args(argv)
    plan = plan_recipe(read_recipe(arguments.recipe, overrides_of(arguments)), force=True)
    data = read_data(plan.recipe)
    print("\n".join(describe_plan(plan, data)))
    if not arguments.no_time:
        print(_time(plan, data["calibration"]))
    return 0


def _time(plan: Plan, tokens: TokenSet) -> str:
    """How long quantization would take here and now, told by solving the first block."""
    if plan.prediction.device_bytes and not torch.cuda.is_available():
        return "time         unknown: the recipe asks for a GPU, and there is none here"
    print(f"timing the first of {len(plan.blocks)} blocks (--no-time: not)", file=sys.stderr)
    return describe_seconds(predict_seconds(plan, tokens))
