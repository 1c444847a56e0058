"""Round to nearest: each weight to the closest int8 multiple of its output channel's scale.

    scale_n = max_k |W_nk| / 127,    q_nk = round(W_nk / scale_n)

No data is needed for the weights; static input scales come from the calibration statistics. It is
the last method of a recipe, and the baseline that others are measured against.
"""

from __future__ import annotations

from ptq.methods.base import BlockWork, Method, QuantizedLinear, quantize_per_channel


def round_to_nearest(work: BlockWork) -> dict[str, QuantizedLinear]:
    """Quantize the block's target layers as they are now, by full name."""
    solved = {}
    for name in work.targets:
        weight, scale = quantize_per_channel(work.block.linears[name].weight)
        solved[name] = QuantizedLinear(weight, scale, work.input_scale(name))
    return solved


class RoundToNearest(Method):
    """Hands over every target layer of a block, rounded."""

    def __init__(self) -> None:
        self.solved: dict[str, QuantizedLinear] = {}

    def solve(self, work: BlockWork) -> None:
        """Round the weights and choose the input scales."""
        self.solved = round_to_nearest(work)

    def commit(self, work: BlockWork) -> None:
        """Hand the rounded layers over."""
        work.quantized.update(self.solved)
        self.solved = {}
