"""How long a run will take, told by its first block: it is solved as the run will solve it."""

from __future__ import annotations

from calibrate.data import TokenSet
from ptq.pipeline.device import fast_products
from ptq.pipeline.driver import in_canonical_order
from ptq.pipeline.solver import BlockSolver
from ptq.plan.plan import Plan
from ptq.result import Stopwatch


def predict_seconds(plan: Plan, tokens: TokenSet) -> dict[str, float]:
    """Solve the first block and write nothing.

    Args:
        plan: Of the run.
        tokens: Its calibration tokens.

    Returns:
        Seconds of the whole run by phase, and in `total`; loading data and writing aside.

    Raises:
        RecipeError: activations hold NaN or infinity.
        CheckpointError: the model is damaged.
    """
    start, block = Stopwatch(), Stopwatch()
    solver = BlockSolver(plan, start)
    with fast_products(solver.device):
        solver.start(in_canonical_order(tokens.sequences()))
        solver.watch = block
        solver.solve(0)
    once, each = start.phases(), block.phases()
    phases = {
        name: once.get(name, 0.0) + len(plan.blocks) * each.get(name, 0.0) for name in once | each
    }
    return phases | {"total": sum(phases.values())}
