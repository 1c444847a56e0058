"""Refinement: moves roundings and scales of a block by gradient, after a method has rounded it.

In the manner of AdaRound (Nagel et al. 2020, arXiv 2004.10568) and AutoRound (Cheng et al. 2023,
arXiv 2309.05516): each integer q of a layer gets an offset v and each scale s a factor g,

    W' = clamp(round(u + v)) * (s g),     u = q + the part of W / s beyond it, within half a step

and both are moved by Adam to lower the squared error of the whole block's output. Gradients pass
through rounding unchanged. Two things make it worth the time: it starts from what GPTQ has found,
and the block is given what the quantized blocks before it hand over while it is to give what the
float block would have, so that it also makes up for their error.

With `metric: kl` the error e_t of the block's output at token t is weighted by what it costs the
model, |g_t|^2 e_t^T G e_t (`calibrate.gradients`, the output of the block for that of a layer), in
place of |e_t|^2: this needs gradients. As both factors are estimates from few tokens, half of
|g_t|^2 is its mean over all tokens, and half of G's mean diagonal is added to G.

Where the error over all samples is not lower in the end, the layers stay as they were: a reported
event. Scales of two levels keep the units of their channels; the multiples move. Layers with fp8
weights have no integers: they stay as they were rounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.namespace import later
from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.block import BlockWork, QuantizedLinear, exact_sum, quantized_block
from ptq.methods.common.method import Method
from ptq.methods.common.spec import BlockSizes, MethodSpec, PlannedLayer, Stage

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

    import calibrate.gradients as gradients
    import kernels.numerics as numerics
    import kernels.two_level as two_level
    from formats.stored import weights as storage
    from ptq.methods.common import rounding

FACTOR_RATE = 0.1  # learning rate of scale factors, relative to that of roundings
MOST_FACTOR = 0.2  # scales change by at most this share
EVEN = 0.5  # share of the mean in tokens' weights, and of G's mean diagonal that is added to it


class RefineSpec(MethodSpec):
    """Gradient descent on roundings and scales, after a method that rounds.

    YAML::

        refine:
          iterations: 100         # steps for each block
          batch: 4                # calibration sequences of a step
          learning_rate: 0.005    # in steps of the integers; falls linearly to 0
          metric: output          # or kl: errors weighted by what they cost the model
          seed: 0
    """

    stage: ClassVar = Stage.REFINE
    name: Literal["refine"] = "refine"
    iterations: Annotated[int, Field(ge=1)] = 100
    """Steps of Adam for each block; time grows in proportion."""
    batch: Annotated[int, Field(ge=1)] = 4
    """Calibration sequences of a step; memory grows in proportion."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.005
    """In steps of the integers; falls linearly to 0."""
    metric: Literal["output", "kl"] = "output"
    """What is minimized: the squared error of the block's output, or what it costs the model
    (`kl`), for which the model runs backward once.
    """
    seed: Annotated[int, Field(ge=0)] = 0
    """Which sequences each step takes."""

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs a layer with integer weights."""
        if {layer.weights.dtype for layer in layers if layer.weights} != {"fp8_e4m3"}:
            return None
        return "refine moves integers; it is not for fp8 weights"

    def algorithm(self) -> Refine:
        """Refines the layers of a block."""
        return Refine(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """How long a layer's integers are moved."""
        if layer.scheme.weights is not None and layer.scheme.weights.dtype != "fp8_e4m3":
            yield f"refine: roundings and scales moved by {self.iterations} steps of its block"

    def memory(self, block: BlockSizes) -> int:
        """Weights with gradients, Adam's moments, and what gradients are traced through."""
        return 44 * block.elements + self.batch * 3 * block.sample_bytes


@dataclass
class Adjustable:
    """A layer's roundings and scales while they move.

    Attributes:
        layer: As it was handed over.
        start: u, fp32 [out, in].
        offset: v, fp32 [out, in].
        factor: g, fp32, one for each scale.
        dtype: Type in which the scales are stored.
        unit: Of scales of two levels, fp32 [out, 1]; None of others.
    """

    layer: QuantizedLinear
    start: Tensor
    offset: Tensor
    factor: Tensor
    dtype: torch.dtype
    unit: Tensor | None

    @classmethod
    def of(cls, layer: QuantizedLinear, weight: Tensor, dtype: torch.dtype) -> Adjustable:
        """Nothing moved yet: v = 0, g = 1."""
        stored, block = layer.weight, layer.spec.block
        steps = weight / numerics.expand_scale(stored.scale, weight.shape, block)
        if stored.zero_point is not None:
            steps = steps + numerics.expand_scale(stored.zero_point.float(), weight.shape, block)
        q = stored.q.float()
        start = q + (steps - q).clamp(-0.499, 0.499)
        offset = torch.zeros_like(start).requires_grad_()
        factor = torch.ones_like(stored.scale).requires_grad_()
        unit = two_level.stored_unit(stored.scale) if layer.spec.two_level else None
        return cls(layer, start, offset, factor, dtype, unit)

    def steps(self) -> Tensor:
        """The integers, through which gradients pass."""
        kind = numerics.TYPES[self.layer.spec.dtype]
        wanted = self.start + self.offset.clamp(-1, 1)
        rounded = wanted + (wanted.round() - wanted).detach()
        return rounded.clamp(kind.q_min, kind.q_max)

    def scale(self) -> Tensor:
        """The scales as they would be stored, through which gradients pass."""
        wanted = self.layer.weight.scale * self.factor.clamp(1 - MOST_FACTOR, 1 + MOST_FACTOR)
        stored = rounding.storable(wanted, self.dtype)
        if self.unit is not None:
            stored = two_level.nearest_multiples(wanted, self.unit) * self.unit
        return wanted + (stored - wanted).detach()

    def weight(self) -> Tensor:
        """W' [out, in]."""
        steps, block = self.steps(), self.layer.spec.block
        if self.layer.weight.zero_point is not None:
            zeros = self.layer.weight.zero_point.float()
            steps = steps - numerics.expand_scale(zeros, steps.shape, block)
        return steps * numerics.expand_scale(self.scale(), steps.shape, block)

    def solved(self) -> QuantizedLinear:
        """The layer as it is now."""
        with torch.no_grad():
            q = self.steps().round().to(self.layer.weight.q.dtype)
            stored = storage.StoredWeight(q, self.scale(), self.layer.weight.zero_point)
        spec, input_scale = self.layer.spec, self.layer.input_scale
        return QuantizedLinear(stored, spec, input_scale, f"{self.layer.statistic}, refined")


@dataclass(frozen=True)
class Cost:
    """What an error of the block's output counts: the square of what this makes of it.

    Attributes:
        factor: L with L L^T = G, of G's diagonal blocks, fp32 [blocks, size, size]; None where all
            errors count alike.
        tokens: Root of each token's weight, of each sample: fp32 [tokens].
        sinks: Tokens from the first on that count nothing.
    """

    factor: Tensor | None = None
    tokens: tuple[Tensor, ...] = ()
    sinks: int = 0

    @classmethod
    def of(cls, work: BlockWork) -> Cost:
        """By both Fisher factors; alike where nothing depends on the block's output."""
        assert work.gradients is not None, "the driver runs backward for methods with gradients"
        seen = work.gradients.of[work.block.name, gradients.STATES]
        mean = seen.mean.item()
        if mean == 0:
            return cls(sinks=work.block.sinks)
        g = seen.outputs.to(work.block.device).double()
        g = g + EVEN * g.diagonal(dim1=1, dim2=2).mean() * torch.eye(g.shape[1]).to(g)
        factor = torch.linalg.cholesky(g * g.shape[1] * len(g)).float()
        samples = enumerate(work.block.inputs)
        weights = (seen.weights_of(i, x.shape[-2]) / mean for i, x in samples)
        roots = ((1 - EVEN) * w + EVEN for w in weights)
        weighted = tuple(w.sqrt()[:, None].to(g.device) for w in roots)
        return cls(factor, weighted, work.block.sinks)

    def __call__(self, found: Tensor, wanted: Tensor, sample: int) -> Tensor:
        """The error of a sample's outputs [tokens, hidden] as its square counts."""
        error = (found - wanted.to(found.device))[self.sinks :]
        if self.factor is None:
            return error
        parts = gradients.in_blocks(error.reshape(-1, error.shape[-1]), self.factor.shape[1])
        return (
            torch.einsum("tbi,bij->tbj", parts, self.factor).flatten(1)
            * self.tokens[sample][self.sinks :]
        )


class Refine(Method):
    """Refines the solved layers of a block; see the module's docstring."""

    quantized_path = True

    def __init__(self, spec: RefineSpec) -> None:
        self.spec = spec
        self.gradients = spec.metric == "kl"
        self.solved: dict[str, QuantizedLinear] = {}

    def solve(self, work: BlockWork) -> None:
        """Move what the method before has handed over."""
        inputs = work.block.quantized_inputs
        assert inputs is not None
        layers = {
            name: Adjustable.of(layer, work.block.linears[name].weight, dtype)
            for name, layer in work.quantized.items()
            if layer.spec.dtype != "fp8_e4m3"
            and isinstance(dtype := work.scale_dtype(name), torch.dtype)
        }
        if not layers:
            return
        with torch.no_grad():
            targets = [work.block.run(sample).cpu() for sample in range(len(inputs))]
        cost = Cost.of(work) if self.spec.metric == "kl" else Cost(sinks=work.block.sinks)
        with quantized_block(work, refined=True):
            before = _error(work, inputs, targets, _weights(layers), cost)
            self._descend(work, layers, inputs, targets, cost)
            after = _error(work, inputs, targets, _weights(layers), cost)
        if after < before:
            self.solved = {name: layer.solved() for name, layer in layers.items()}
        else:
            message = f"not refined: the block's error {before:.3g} would become {after:.3g}"
            work.report(work.block.name, "fallback", message)

    def commit(self, work: BlockWork) -> None:
        """Hand the refined layers over."""
        work.quantized.update(self.solved)
        self.solved = {}

    def _descend(
        self,
        work: BlockWork,
        layers: Mapping[str, Adjustable],
        inputs: list[Tensor],
        targets: list[Tensor],
        cost: Cost,
    ) -> None:
        spec = self.spec
        groups = [
            {"params": [layer.offset for layer in layers.values()], "lr": spec.learning_rate},
            {
                "params": [layer.factor for layer in layers.values()],
                "lr": spec.learning_rate * FACTOR_RATE,
            },
        ]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, spec.iterations)
        for batch in self._paced(_batches(len(inputs), spec), work.block.device):
            weights = {name: layer.weight() for name, layer in layers.items()}
            losses = [
                cost(work.block.forward(inputs[i], i, weights), targets[i], i).square().mean()
                for i in batch
            ]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            fall.step()

    def _paced(self, batches: Iterator[list[int]], device: torch.device) -> Iterator[list[int]]:
        """All of them, or the first few; then the others would take as long as those after one."""
        if self.brief is None:
            yield from batches
            return
        times = []
        for batch in islice(batches, self.brief):
            yield batch
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter())
        step = (times[-1] - times[0]) / max(1, len(times) - 1)
        self.unspent = (self.spec.iterations - len(times)) * step


def _batches(samples: int, spec: RefineSpec) -> Iterator[list[int]]:
    """Samples of each step: all of them in a random order, then in another one."""
    generator = torch.Generator().manual_seed(spec.seed)
    order: list[int] = []
    for _ in range(spec.iterations):
        while len(order) < min(spec.batch, samples):
            order += torch.randperm(samples, generator=generator).tolist()
        batch, order = order[: spec.batch], order[spec.batch :]
        yield batch


def _weights(layers: Mapping[str, Adjustable]) -> dict[str, Tensor]:
    """The layers' weights as they are now, without gradients."""
    with torch.no_grad():
        return {name: layer.weight() for name, layer in layers.items()}


def _error(
    work: BlockWork,
    inputs: list[Tensor],
    targets: list[Tensor],
    weights: Mapping[str, Tensor],
    cost: Cost,
) -> float:
    """Squared error of the block's outputs, as it counts, summed exactly over all samples."""
    with torch.no_grad():
        lost = (
            cost(work.block.forward(x, i, weights), y, i).double()
            for i, (x, y) in enumerate(zip(inputs, targets, strict=True))
        )
        return exact_sum(each.square().sum() for each in lost)
