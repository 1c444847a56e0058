"""How long a run will take, predicted from its first block, and from a few steps of a method."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from calibrate.backward import block_gradients, head_gradients
from calibrate.data import TokenSet
from calibrate.gradients import BlockGradients
from ptq.pipeline.driver import in_canonical_order
from ptq.pipeline.gradients import run_backward, size_of_blocks
from ptq.pipeline.solver import BlockSolver
from ptq.pipeline.team import fast_products
from ptq.plan.plan import Plan
from ptq.result import Stopwatch

STEPS = 3  # of a method that takes many equal ones


def predict_seconds(plan: Plan, tokens: TokenSet) -> dict[str, float]:
    """Solve the first block and write nothing.

    Args:
        tokens: Its calibration tokens.

    Returns:
        Seconds of the whole run by phase, and in `total`; loading data and writing aside.

    Raises:
        RecipeError: activations hold NaN or infinity.
        CheckpointError: the model is damaged.
    """
    start, block = Stopwatch(), Stopwatch()
    solver = BlockSolver(plan, block)
    for method in solver.methods:
        method.brief = STEPS
    with fast_products(solver.device):
        sequences = in_canonical_order(tokens.sequences())
        solver.find_sinks(sequences, blocks=1)
        solver.watch = start
        if solver.schedule.gradients:
            first = _first_gradients(solver, sequences, start, block)
            solver.gradients = lambda _: first
        solver.start(sequences)
        solver.watch = block
        solver.solve(0)
    once, each = start.phases(), block.phases()
    for spec, method in zip(solver.specs, solver.methods, strict=True):
        each[spec.name] += method.unspent
    phases = {
        name: once.get(name, 0.0) + _blocks(plan) * each.get(name, 0.0) for name in once | each
    }
    return phases | {"total": sum(phases.values())}


def _blocks(plan: Plan) -> float:
    """How many blocks a run has, its head counted as so many as it has their weights."""
    weights = {m.name: math.prod(m.shape) for m in plan.modules if m.action == "quantize"}
    head = weights.pop(plan.head, 0) if plan.head is not None else 0
    count = len(plan.blocks)
    return count * (1 + head / sum(weights.values())) if weights else count


def _first_gradients(
    solver: BlockSolver, sequences: Sequence[Tensor], once: Stopwatch, each: Stopwatch
) -> BlockGradients:
    """Gradients of the first block, as if it were the last: they take as long."""
    stream = solver.new_stream()
    samples = run_backward(sequences, solver.recipe.statistics.gradient_tokens)
    with once.phase("backward"):
        stream.start(samples)
    before = list(stream.inputs)
    with each.phase("backward"):
        stream.advance(stream.load(0))
    with once.phase("backward"):
        gradients, _ = head_gradients(stream, samples)
    with each.phase("backward"):
        stream.inputs[:] = before
        block = stream.load(0)
        solver.team.take(block)
        return block_gradients(block, gradients, size_of_blocks(stream), solver.team)
