"""Both Fisher factors of a block's layers as its weights are now (`calibrate.gradients`).

G comes from the backward pass, which sees the original block; A is accumulated whenever samples
run through the block, each token weighted by |g_t|^2. Methods then divide what layers read and what
they give by factors: with y' = D^-1 y a gradient becomes D g, and G becomes D G D. As G has trace 1
and A holds the gradients' size, A takes the factor tr(D G D), so that
KL = 1/2 tr(E^T G E A) stays what it was for the error D^-1 E.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from calibrate.gradients import BlockGradients, FisherFactors, Gradients
from ptq.methods.common.moments import Moments


class WeightedMoments(Moments):
    """Accumulates A = sum_t |g_t|^2 x_t x_t^T / tokens of linear layers.

    Layers that share an input have each their own. Samples that did not run backward weigh as the
    others do on average.
    """

    def __init__(self, gradients: BlockGradients, layers: Iterable[str]) -> None:
        stand_in = {name: name for name in layers}
        super().__init__(stand_in, stand_in, full=True)
        self._gradients = gradients

    @classmethod
    def restored(cls, known: Mapping[str, Tensor], layers: Iterable[str]) -> WeightedMoments:
        """What `state` gave.

        Raises:
            KeyError: a wanted layer is missing.
        """
        found = cls(BlockGradients(), layers)
        found._sums = {name: known[name] for name in found._wanted}
        found._tokens = dict.fromkeys(found._wanted, 1)
        return found

    def part(self) -> WeightedMoments:
        """Nothing of the same, for `merge`."""
        return WeightedMoments(self._gradients, self._wanted)

    def observe(self, name: str, x: Tensor, sample: int) -> None:
        """Add the input [tokens, in] of a layer for a sample, by its index among those that run."""
        if name not in self._wanted:
            return
        tokens = len(x)  # sink tokens, which are not shown, come first
        roots = self._gradients.output(name).weights_of(sample, tokens)[-tokens:].sqrt()
        if not bool(roots.all()):  # tokens that did not come to an expert
            some = roots.nonzero()[:, 0]
            roots, x = roots[some], x[some.to(x.device)]
        self.add(name, x.float() * roots.to(x.device)[:, None], tokens)

    def observe_sinks(self, name: str, x: Tensor, sample: int) -> None:
        """Add rows that stand for sink tokens, as tokens of the sample's mean weight."""
        if name in self._wanted:
            weights = self._gradients.output(name).weights_of(sample, 1)
            self.add(name, x.float() * weights.mean().sqrt().to(x.device), 0)

    def state(self) -> dict[str, Tensor]:
        """A of each layer, by its full name."""
        return {name: self.of(name) for name in sorted(self._wanted)}


def rescaled(outputs: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """D G D of outputs that were divided by `factor`, and its trace.

    Args:
        outputs: G in diagonal blocks, fp32 [blocks, size, size]; of trace 1 together.
        factor: Diagonal of D [blocks * size], or less where the last block is filled up with zeros.

    Returns:
        (D G D / tr(D G D), tr(D G D) fp64): zeros and 1 where G is zero.
    """
    count, size, _ = outputs.shape
    d = torch.ones(count * size, dtype=torch.float64, device=outputs.device)
    d[: len(factor)] = factor.to(d)
    d = d.view(count, size)
    turned = outputs.double() * d[:, :, None] * d[:, None, :]
    trace = turned.diagonal(dim1=1, dim2=2).sum()
    trace = torch.where(trace > 0, trace, 1.0)
    return (turned / trace).float(), trace


def factors(
    weighted: Tensor,
    gradients: Gradients,
    *,
    since_samples: Tensor | None,
    inputs: Tensor | None,
    outputs: Tensor | None,
) -> FisherFactors:
    """Factors of a layer as it is now.

    Args:
        weighted: A, as the samples last showed it [in, in].
        gradients: Of its output, of the original block.
        since_samples: What its inputs were divided by since the samples last ran, fp64 [in]; None
            for nothing.
        inputs: The same since the block was loaded.
        outputs: What its outputs were divided by since then, fp64 [out], or None.
    """
    pair = _folded(weighted, gradients.outputs, since_samples, outputs)
    if gradients.sequences is None:
        return FisherFactors(*pair)
    a, g = (side.to(weighted.device) for side in gradients.sequences)
    return FisherFactors(*pair, sequences=_folded(a, g, inputs, outputs))


def _folded(
    a: Tensor, g: Tensor, inputs: Tensor | None, outputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A and G of inputs and outputs that were divided."""
    g = g.to(a.device)
    if inputs is not None:
        inverse = (1.0 / inputs).to(a)
        a = a * (inverse[:, None] * inverse)
    if outputs is not None:
        g, trace = rescaled(g, outputs)
        a = a * trace.to(a)
    return a, g
