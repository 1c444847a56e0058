"""Both Fisher factors of a block's layers as its weights are now (`calibrate.gradients`).

G comes from the backward pass, which sees the original block; A is accumulated whenever samples
run through the block, each token weighted by |g_t|^2. Methods then divide what layers read and what
they give by factors: with y' = D^-1 y a gradient becomes D g, and G becomes D G D. As G has trace 1
and A holds the gradients' size, A takes the factor tr(D G D), so that
KL = 1/2 tr(E^T G E A) stays what it was for the error D^-1 E.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.gradients import BlockGradients, FisherFactors, Gradients
from ptq.methods.common.moments import Moments


class WeightedMoments:
    """Accumulates A = sum_t |g_t|^2 x_t x_t^T / tokens of linear layers.

    Layers that share an input have each their own. Samples that did not run backward weigh as the
    others do on average.

    Args:
        gradients: Of the block.
        layers: Those that are wanted.
    """

    def __init__(self, gradients: BlockGradients, layers: Iterable[str]) -> None:
        self._gradients, self._wanted = gradients, set(layers)
        self._moments = Moments({n: n for n in self._wanted}, self._wanted, full=True)
        self._known: dict[str, Tensor] = {}

    @classmethod
    def restored(cls, known: Mapping[str, Tensor], layers: Iterable[str]) -> WeightedMoments:
        """What `state` gave.

        Raises:
            KeyError: a wanted layer is missing.
        """
        found = cls(BlockGradients(), ())
        found._known = {name: known[name] for name in layers}
        return found

    def part(self) -> WeightedMoments:
        """Nothing of the same, for `merge`."""
        return WeightedMoments(self._gradients, self._wanted)

    def place(self, devices: Mapping[str, torch.device]) -> None:
        """Say where sums of several devices are kept, by their layers."""
        self._moments.place(devices)

    def merge(self, part: WeightedMoments) -> None:
        """Add what some more samples have shown; the part is empty afterwards."""
        self._moments.merge(part._moments)

    def complete(self) -> None:
        """Nothing more will come: from now on several threads may read."""
        self._moments.complete()

    def observe(self, name: str, x: Tensor, sample: int) -> None:
        """Add the input [tokens, in] of a layer for a sample, by its index among those that run."""
        if name not in self._wanted:
            return
        tokens = len(x)  # sink tokens, which are not shown, come first
        roots = self._gradients.output(name).weights_of(sample, tokens)[-tokens:].sqrt()
        if not bool(roots.all()):  # tokens that did not come to an expert
            some = roots.nonzero()[:, 0]
            roots, x = roots[some], x[some.to(x.device)]
        self._moments.observe(name, x.float() * roots.to(x.device)[:, None], tokens)

    def observe_sinks(self, name: str, x: Tensor, sample: int) -> None:
        """Add rows that stand for sink tokens, as tokens of the sample's mean weight."""
        if name in self._wanted:
            weights = self._gradients.output(name).weights_of(sample, 1)
            self._moments.observe(name, x.float() * weights.mean().sqrt().to(x.device), 0)

    def of(self, name: str) -> Tensor:
        """A of a layer, fp32 [in, in]."""
        return self._known[name] if name in self._known else self._moments.of(name)

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


@dataclass(frozen=True)
class Divisors:
    """What a layer's inputs [in] and outputs [out] were divided by, fp64; None for nothing.

    Attributes:
        since_samples: Inputs, since the samples last ran.
        inputs: Since the block was loaded.
        outputs: Since the block was loaded.
    """

    since_samples: Tensor | None = None
    inputs: Tensor | None = None
    outputs: Tensor | None = None


def factors(weighted: Tensor, gradients: Gradients, divided: Divisors) -> FisherFactors:
    """Factors of a layer as it is now.

    Args:
        weighted: A, as the samples last showed it [in, in].
        gradients: Of its output, of the original block.
        divided: What was folded.
    """
    pair = _folded(weighted, gradients.outputs, divided.since_samples, divided.outputs)
    if gradients.sequences is None:
        return FisherFactors(*pair)
    a, g = (side.to(weighted.device) for side in gradients.sequences)
    return FisherFactors(*pair, sequences=_folded(a, g, divided.inputs, divided.outputs))


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
