"""Round to nearest: each weight to the closest multiple of its block's scale.

    q = clamp(round(W / scale) + zero_point),   scale by the largest magnitude, or searched

Without a search no data is needed for the weights; static input scales come from the calibration
statistics. With absmax scales it is the baseline that other methods are measured against.
"""

from __future__ import annotations

from torch import Tensor

from ptq.methods.base import BlockWork, Method, QuantizedLinear
from ptq.methods.moments import Moments
from ptq.methods.rounding import round_weight
from ptq.methods.specs import RTNSpec, ScaleSearch


def round_to_nearest(
    work: BlockWork, search: ScaleSearch = "absmax", moments: Moments | None = None
) -> dict[str, QuantizedLinear]:
    """Quantize the block's target layers as they are now, by full name."""
    solved = {}
    for name in work.targets:
        weight, inputs = work.block.linears[name].weight, moments and moments.of(name)
        spec, dtype = work.weight_spec, work.scale_dtype(name)
        stored = round_weight(weight, spec, dtype, search, inputs)
        solved[name] = QuantizedLinear(stored, spec, work.input_scale(name), search)
    return solved


class RoundToNearest(Method):
    """Hands over every target layer of a block, rounded."""

    def __init__(self, spec: RTNSpec) -> None:
        self.spec = spec
        self.observes = spec.scale in ("weighted_mse", "output_mse")
        self.moments: Moments | None = None
        self.solved: dict[str, QuantizedLinear] = {}

    def prepare(self, work: BlockWork) -> None:
        """Collect second moments where the search weighs errors with them."""
        if self.observes:
            self.moments = Moments(work, full=self.spec.scale == "output_mse")

    def observe(self, name: str, x: Tensor) -> None:
        """Add a sample's second moments."""
        if self.moments is not None:
            self.moments.observe(name, x)

    def solve(self, work: BlockWork) -> None:
        """Round the weights and choose the input scales."""
        self.solved = round_to_nearest(work, self.spec.scale, self.moments)

    def commit(self, work: BlockWork) -> None:
        """Hand the rounded layers over."""
        work.quantized.update(self.solved)
        self.solved, self.moments = {}, None
