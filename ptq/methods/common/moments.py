"""Second moments of the inputs of a block's linear layers: GPTQ's Hessian, and importance.

H = E[x x^T] over the tokens of all samples, fp32 [in, in]. The driver runs one sample at a time, in
an order set by their content, so the sum does not depend on how the data set is shuffled or padded.
Neighbours are summed by themselves and these sums in their order (`merge`), so that it does not
depend on the number of devices, either. Layers that share an input share one H. As it is symmetric,
only the bands of rows below its diagonal, each with its block of the diagonal, are multiplied:
little more than half of it.

Both Fisher factors of a layer, as its weights are now, are of these sums (`calibrate.gradients`).
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
from calibrate.transfers import add_beside, wait_for_sums, zeros_for

BAND = 2048  # columns of a Hessian that are held in fp64 at once to weight errors


def row_bands(width: int) -> list[slice]:
    """Rows of a [width, width] matrix in bands: eight, or fewer of 128 rows at least."""
    size = max(128, -(-width // 8))
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]


class Moments:
    """Accumulates E[x x^T], or only its diagonal, of the inputs of linear layers.

    Args:
        stand_in: For each layer the one whose input is taken for its own.
        full: Whether all of E[x x^T] is kept, not only its diagonal.
    """

    def __init__(self, stand_in: Mapping[str, str], layers: Iterable[str], *, full: bool) -> None:
        self.full = full
        self._devices: Mapping[str, torch.device] = {}
        self._stand_in = stand_in
        self._wanted = {stand_in[name] for name in layers}
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._halves: set[str] = set()  # of sums whose blocks above the diagonal are not filled in

    def add(self, name: str, x: Tensor, tokens: int | None = None) -> None:
        """Add the input [tokens, in] of a layer; of layers that share it, the first counts.

        Args:
            tokens: How many it stands for, where rows of zeros were left out.
        """
        if name not in self._wanted:
            return
        x = x.float()
        if name not in self._sums:
            width = x.shape[1]
            self._sums[name] = x.new_zeros((width, width) if self.full else (width,))
        if self.full:
            self._halves.add(name)
            for rows in row_bands(x.shape[1]):
                self._sums[name][rows, : rows.stop].addmm_(x[:, rows].T, x[:, : rows.stop])
        else:
            self._sums[name].add_(x.square().sum(dim=0))
        self._tokens[name] = self._tokens.get(name, 0) + (len(x) if tokens is None else tokens)

    def part(self) -> Moments:
        """Nothing of the same, for `merge`."""
        return Moments(self._stand_in, self._wanted, full=self.full)

    def place(self, devices: Mapping[str, torch.device]) -> None:
        """Say where sums of several devices are kept, by the layers that stand for others."""
        self._devices = devices

    def merge(self, part: Moments) -> None:
        """Add what some more samples have shown; the part is empty afterwards."""
        for name, tokens in part._tokens.items():
            own = part._sums[name]
            if name not in self._sums:
                self._sums[name] = zeros_for(own, self._devices.get(name))
            if name in self._devices:
                add_beside(self._sums[name], own)
            else:
                self._sums[name].add_(own)
            own.zero_()
            self._tokens[name] = self._tokens.get(name, 0) + tokens
        self._halves |= part._halves
        part._tokens.clear()
        part._halves.clear()

    def complete(self) -> None:
        """Nothing more will come: from now on several threads may read."""
        for name, total in self._sums.items():
            if name in self._devices:
                wait_for_sums(total)
            self._complete(name)

    def of(self, name: str) -> Tensor:
        """E[x x^T] of a layer's input [in, in], or its diagonal [in]."""
        stand_in = self._stand_in[name]
        self._complete(stand_in)
        return self._sums[stand_in] / self._tokens[stand_in]

    def _complete(self, name: str) -> None:
        """Fill in what is above the diagonal."""
        if name in self._halves:
            self._halves.remove(name)
            total = self._sums[name]
            for rows in row_bands(len(total)):
                total[: rows.start, rows] = total[rows, : rows.start].T

    def state(self) -> dict[str, Tensor]:
        """Tensors to save: `<layer>/sum` and `<layer>/tokens`."""
        for name in self._sums:
            self._complete(name)
        return {f"{name}/sum": total for name, total in self._sums.items()} | {
            f"{name}/tokens": torch.tensor([tokens]) for name, tokens in self._tokens.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave.

        Raises:
            KeyError: a wanted layer is missing.
        """
        self._sums = {name: state[f"{name}/sum"] for name in self._wanted}
        self._tokens = {name: int(state[f"{name}/tokens"].item()) for name in self._wanted}


def output_errors(error: Tensor, hessian: Tensor) -> Tensor:
    """e H e^T of each row of a weight's error [N, K]: fp64 [N].

    On a GPU products are of fp32, in TF32: no term is negative, so that the sum errs as little.
    """
    dtype = error.dtype if error.is_cuda else torch.float64
    wide, found = error.to(dtype), torch.zeros(len(error), dtype=torch.float64, device=error.device)
    for start in range(0, wide.shape[1], BAND):
        columns = slice(start, start + BAND)
        carried = (wide @ hessian[:, columns].to(dtype)).mul_(wide[:, columns])
        found += carried.sum(dim=1, dtype=torch.float64)
    return found


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
