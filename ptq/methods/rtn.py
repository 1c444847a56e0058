"""Round to nearest: each weight to the closest multiple of its block's scale.

    q = clamp(round(W / scale) + zero_point),   scale by the largest magnitude, or searched

Without a search no data is needed for the weights; static input scales come from the calibration
statistics. With absmax scales it is the baseline that other methods are measured against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from formats.namespace import later
from ptq.methods.common.method import LayerMethod
from ptq.methods.common.spec import MOMENTS, MethodSpec, PlannedLayer, ScaleSearch, Stage

if TYPE_CHECKING:
    from ptq.methods.common.block import BlockWork
with later():
    from ptq.methods.common import rounding


class RTNSpec(MethodSpec):
    """Round to nearest.

    YAML: ``rtn: {scale: absmax}``
    """

    stage: ClassVar = Stage.ROUND
    makes_super_blocks: ClassVar = True
    name: Literal["rtn"] = "rtn"
    scale: ScaleSearch = "absmax"
    """How scales of weights are chosen: `absmax` cuts nothing; `mse` minimizes the squared error of
    each block of weights, `weighted_mse` with the inputs' second moments as weights, `output_mse`
    the error of the block's contribution to the output, which takes the longest.
    """

    def algorithm(self) -> RoundToNearest:
        """Rounds the layers of a block."""
        return RoundToNearest(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """How the layer is rounded."""
        yield f"rtn: rounded to the nearest, scales by {self.scale}"


class RoundToNearest(LayerMethod):
    """Hands over every target layer of a block, rounded."""

    spec: RTNSpec

    def __init__(self, spec: RTNSpec) -> None:
        super().__init__(spec)
        self.moments = MOMENTS[spec.scale]
        self.needs = "weights" if self.moments == "none" else "statistics"

    def solve(self, work: BlockWork) -> None:
        """Round the weights and choose the input scales."""
        self.solved = rounding.round_to_nearest(work, self.spec.scale)
