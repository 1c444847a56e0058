"""Second moments of the inputs of a block's linear layers: GPTQ's Hessian, and importance.

H = E[x x^T] over the tokens of all samples, fp32 [in, in]. The driver runs one sample at a time, in
an order set by their content, so the sum does not depend on how the data set is shuffled or padded.
Layers that share an input share one H.
"""

from __future__ import annotations

from torch import Tensor

from ptq.methods.base import BlockWork


class Moments:
    """Accumulates E[x x^T], or only its diagonal, of the inputs of a block's target layers."""

    def __init__(self, work: BlockWork, *, full: bool) -> None:
        self._full = full
        self._layer = work.observed_for
        self._wanted = {self._layer[name] for name in work.targets}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}

    def observe(self, name: str, x: Tensor) -> None:
        """Add the input [tokens, in] of a layer; of layers that share it, the first counts."""
        if name not in self._wanted:
            return
        x = x.float()
        total = x.T @ x if self._full else x.square().sum(dim=0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._tokens[name] = self._tokens.get(name, 0) + len(x)

    def of(self, name: str) -> Tensor:
        """E[x x^T] of a layer's input [in, in], or its diagonal [in]."""
        stand_in = self._layer[name]
        return self._sums[stand_in] / self._tokens[stand_in]
