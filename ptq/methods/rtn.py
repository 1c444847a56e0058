"""Round to nearest: each weight to the closest multiple of its block's scale.

    q = clamp(round(W / scale) + zero_point),   scale by the largest magnitude, or searched

Without a search no data is needed for the weights; static input scales come from the calibration
statistics. With absmax scales it is the baseline that other methods are measured against.
"""

from __future__ import annotations

from ptq.methods.base import BlockWork, Method, MomentKind, QuantizedLinear
from ptq.methods.rounding import round_weight
from ptq.methods.specs import RTNSpec, ScaleSearch

MOMENTS: dict[ScaleSearch, MomentKind] = {
    "absmax": "none",
    "mse": "none",
    "weighted_mse": "diagonal",
    "output_mse": "full",
}


def round_to_nearest(work: BlockWork, search: ScaleSearch = "absmax") -> dict[str, QuantizedLinear]:
    """Quantize the block's target layers as they are now, by full name."""
    solved = {}
    for name in work.targets:
        weight = work.block.linears[name].weight
        inputs = work.second_moments(name) if MOMENTS[search] != "none" else None
        spec, dtype = work.weight_spec(name), work.scale_dtype(name)
        stored = round_weight(weight, spec, dtype, search, inputs)
        solved[name] = QuantizedLinear(stored, spec, work.input_scale(name), search)
    return solved


class RoundToNearest(Method):
    """Hands over every target layer of a block, rounded."""

    def __init__(self, spec: RTNSpec) -> None:
        self.spec = spec
        self.moments = MOMENTS[spec.scale]
        self.needs = "weights" if self.moments == "none" else "statistics"
        self.solved: dict[str, QuantizedLinear] = {}

    def solve(self, work: BlockWork) -> None:
        """Round the weights and choose the input scales."""
        self.solved = round_to_nearest(work, self.spec.scale)

    def commit(self, work: BlockWork) -> None:
        """Hand the rounded layers over."""
        work.quantized.update(self.solved)
        self.solved = {}
