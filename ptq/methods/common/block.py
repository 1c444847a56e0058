"""A decoder block on its way from float to quantized: what methods work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from calibrate.spec import SINK_INPUT, SINK_TOKENS, ObserverSpec
from formats.families.block_layers import SmoothingGroup
from formats.namespace import later
from formats.scheme import LayerScheme, Scheme, WeightSpec
from ptq.methods.common.events import Event, EventKind, SmoothingRow

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.block import DecoderBlock
    from calibrate.gradients import BlockGradients, FisherFactors
    from calibrate.statistics import Key, Statistics
    from calibrate.tensor_statistics import TensorStatistics
    from formats.stored.weights import StoredWeight
    from ptq.methods.common.moments import Moments, WeightedMoments
    from ptq.methods.common.positions import Positions
with later():
    import torch
    from torch import nn

    import kernels.numerics as numerics
    from calibrate import observers, statistics
    from formats.stored import weights as storage
    from ptq.methods.common import moments as second_moments


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear layer as it will be stored.

    Attributes:
        weight: The quantized weight [out, in] with its scales.
        input_scale: fp32 [1], or None where inputs are not quantized or scaled when they arrive.
        statistic: How the clipping range of the weight was found.
    """

    weight: StoredWeight
    spec: WeightSpec
    input_scale: Tensor | None
    statistic: str = "absmax"

    def to(self, device: torch.device) -> QuantizedLinear:
        """The same on another device."""
        scale = None if self.input_scale is None else self.input_scale.to(device)
        return replace(self, weight=self.weight.to(device), input_scale=scale)

    def dequantized(self) -> Tensor:
        """The weight that is multiplied: fp32 [out, in]."""
        w = self.weight
        return numerics.dequantize(w.q, w.scale, w.zero_point, self.spec.block)


@dataclass(frozen=True)
class BlockSettings:
    """What recipe and model say of a block: the same for all parts of it.

    Attributes:
        input_observer: How the clipping range of a static input is found.
        common_input: Layers that read one input, by full name: a name for that input.
        head_dim: Elements of one attention head.
        pairs: A number for each of them; those that rotary embedding turns together have one.
        before_feed_forward: Full name of the norm between the residual stream and the feed-forward
            layer; None where no smoothing group tells.
        positions: Where K and Q may stand in a context; None where their statistics are to be those
            of the windows.
        kept: Full names of the model's layers that stay as they are stored.
    """

    input_observer: ObserverSpec
    common_input: Mapping[str, str] = field(default_factory=dict)
    head_dim: int = 1
    pairs: tuple[int, ...] = ()
    before_feed_forward: str | None = None
    positions: Positions | None = None
    kept: Collection[str] = ()


@dataclass
class Seen:
    """What the samples showed when they last ran through a block; nothing before that.

    Attributes:
        statistics: Of the inputs of its linear layers, of K and of V.
        moments: Second moments of those inputs, where a method wants them.
        weighted: The inputs' side of the Fisher factors, where the block's gradients are.
        divisors: What methods have divided those inputs, K and V by since then.
    """

    statistics: Statistics = field(default_factory=lambda: statistics.Statistics())
    moments: Moments | None = None
    weighted: WeightedMoments | None = None
    divisors: dict[Key, Tensor] = field(default_factory=dict)


@dataclass
class BlockWork:
    """One decoder block on its way from float to quantized: all that a method sees.

    Attributes:
        block: The block with its float weights as they are now, and its inputs.
        settings: What does not change.
        dtype_of: Element type that a tensor has in the checkpoint, by its full name.
        scheme: What is to be quantized, and how, but for layers with a scheme of their own.
        schemes: Of each target, by its full name; `scheme_of` tells.
        targets: Full names of this block's linear layers that are to be quantized.
        groups: Its smoothing groups.
        seen: What its samples showed.
        gradients: Of the original block, where a method wants them.
        clips: Factors of the ranges of static inputs, by layer, where a method chose them.
        rescaled: What methods have divided inputs and outputs of linear layers, K and V by since
            the block was loaded.
        folded: Float tensors that a method changed, by full name, in the checkpoint's type.
        quantized: The solved layers, by full name.
        events: What a person should know.
        smoothing: What was chosen for each smoothing group.
    """

    block: DecoderBlock
    settings: BlockSettings
    dtype_of: Callable[[str], torch.dtype]
    scheme: Scheme
    schemes: Mapping[str, LayerScheme]
    targets: tuple[str, ...]
    groups: tuple[SmoothingGroup, ...] = ()
    seen: Seen = field(default_factory=Seen)
    gradients: BlockGradients | None = None
    clips: dict[str, float] = field(default_factory=dict)
    rescaled: dict[Key, Tensor] = field(default_factory=dict)
    folded: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedLinear] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    smoothing: list[SmoothingRow] = field(default_factory=list)

    def report(self, module: str, kind: EventKind, message: str) -> None:
        """Keep for the record what a person should know of a module."""
        self.events.append(Event(module=module, kind=kind, message=message))

    def tell(self, row: SmoothingRow) -> None:
        """Keep for the record what was chosen for a smoothing group."""
        if row.fallback is not None:
            self.events.append(row.fallback)
        self.smoothing.append(row)

    def part(
        self,
        block: DecoderBlock,
        targets: Sequence[str] | None = None,
        groups: Sequence[SmoothingGroup] | None = None,
    ) -> BlockWork:
        """Some of the work, to be solved beside the rest of it; what it tells is its own.

        Args:
            block: The block as it is now, on any device.
            targets: Of these targets; None for all.
            groups: Of these smoothing groups; None for all.
        """
        own = self.targets if targets is None else tuple(targets)
        return replace(
            self,
            block=block,
            targets=own,
            groups=self.groups if groups is None else tuple(groups),
            seen=replace(self.seen, divisors=dict(self.seen.divisors)),
            clips=dict(self.clips),
            rescaled=dict(self.rescaled),
            folded={},
            quantized={n: q.to(block.device) for n, q in self.quantized.items() if n in own},
            events=[],
            smoothing=[],
        )

    def module(self, name: str) -> nn.Module:
        """A module of the block by its full name, such as `model.layers.0.input_layernorm`."""
        return self.block.submodule(name)

    @property
    def feed_forward_norm(self) -> nn.Module | None:
        """The module of `BlockSettings.before_feed_forward`."""
        name = self.settings.before_feed_forward
        return None if name is None else self.module(name)

    def samples(self, most: int) -> Sequence[int]:
        """The first `most` samples: the driver has put them in an order set by their content."""
        return range(min(most, len(self.block.inputs)))

    def observed(self, name: str, role: str) -> TensorStatistics:
        """What is known of a linear layer's `input`, the `k_cache` or the `v_cache` as it is now.

        Of what was divided since the samples ran, only maxima are known.
        """
        divided = "input" if role == SINK_INPUT else role
        seen, divisor = self.seen.statistics[name, role], self.seen.divisors.get((name, divided))
        return seen if divisor is None else seen.divided(divisor)

    def second_moments(self, name: str) -> Tensor:
        """E[x x^T] of a linear layer's input as it is now [in, in], or its diagonal [in]."""
        kept, divisor = self.seen.moments, self.seen.divisors.get((name, "input"))
        assert kept is not None, "no method asked for them"
        moments = kept.of(name).to(self.block.device)
        if divisor is None:
            return moments
        inverse = (1.0 / divisor).to(moments)
        return moments * (inverse[:, None] * inverse if kept.full else inverse.square())

    def fisher(self, name: str) -> FisherFactors:
        """Fisher factors of a linear layer, one of `targets`, for its weight as it is now.

        A is on the block's device, and so is G. Where no token's loss depends on the layer (an
        expert that got no token), both are zero.
        """
        assert self.gradients is not None, "no method asked for gradients"
        assert self.seen.weighted is not None, "the samples have not run"
        return second_moments.factors(
            self.seen.weighted.of(name).to(self.block.device),
            self.gradients.output(name),
            since_samples=self.seen.divisors.get((name, "input")),
            inputs=self.rescaled.get((name, "input")),
            outputs=self.rescaled.get((name, "output")),
        )

    def divide(self, name: str, role: str, factor: Tensor) -> None:
        """Tell that a tensor is from now on divided by `factor`, fp64 of its channels.

        Args:
            name: The module that it belongs to.
            role: `input` or `output` of a linear layer, `k_cache` or `v_cache` of an attention.
            factor: Of a layer [channels], of a cache [kv heads, D].
        """
        if bool((factor == 1).all()):
            return
        for known in (self.seen.divisors, self.rescaled):
            before = known.get((name, role))
            known[name, role] = factor if before is None else before * factor

    def store(self, name: str, value: Tensor) -> None:
        """Give a float tensor a new value, by its full name: as the checkpoint's type holds it."""
        module, _, leaf = name.rpartition(".")
        stored = value.to(self.dtype_of(name))
        set_parameter(self.module(module), leaf, stored.float().to(self.block.device))
        self.folded[name] = stored.cpu()

    def scheme_of(self, name: str) -> LayerScheme:
        """How a linear layer's weight and input are to be quantized."""
        return self.schemes.get(name, self.scheme.of_layers)

    def input_scale(self, name: str, role: str = "input") -> Tensor | None:
        """Static scale of a linear layer's input, or of the rows of sink tokens (`SINK_INPUT`).

        Returns:
            fp32 [1]; None where there is none.
        """
        spec = self.scheme_of(name).activations
        known = role == "input" or (name, role) in self.seen.statistics
        if spec is None or spec.dynamic or not known:
            return None
        top = self.input_absmax(name) if role == "input" else self.observed(name, role).absmax
        absmax = torch.tensor([top], dtype=torch.float32)
        return numerics.choose_scale(absmax, numerics.TYPES[spec.dtype])

    def seen_input(
        self, name: str, x: Tensor, scale: Tensor | None, sink_scale: Tensor | None = None
    ) -> Tensor:
        """What the kernels see of a quantized layer's input [..., in], with its static scale.

        Args:
            sink_scale: That of sink tokens, the first ones of [..., tokens, in]; None for `scale`.
                An expert's layer reads some of the tokens, among which sink tokens are not known:
                all have the scale of ordinary ones.
        """
        spec, first = self.scheme_of(name).activations, self.block.sinks
        if spec is None:
            return x
        kind = numerics.TYPES[spec.dtype]
        seen = numerics.fake_quantize_activations(x, scale, kind, spec.group)
        if not first or sink_scale is None or self.block.expert_of(name):
            return seen
        own = x[..., :first, :]
        sinks = numerics.fake_quantize_activations(own, sink_scale, kind, spec.group)
        return torch.cat((sinks, seen[..., first:, :]), dim=-2)

    @property
    def observed_for(self) -> dict[str, str]:
        """Each linear layer's stand-in for what its input shows: the first that reads the same."""
        first, common = dict[str, str](), self.settings.common_input
        for name in self.block.linears:
            first.setdefault(common.get(name, name), name)
        return {name: first[common.get(name, name)] for name in self.block.linears}

    def merged_with(self, name: str) -> list[str]:
        """The quantized layers of a layer's module that read its input: they run as one."""
        stand_in, module = self.observed_for, name.rpartition(".")[0]
        return [
            other
            for other in self.targets
            if other.rpartition(".")[0] == module and stand_in[other] == stand_in[name]
        ]

    def scale_dtype(self, name: str) -> numerics.ScaleStorage:
        """How a layer's weight scales are stored: in the model's type where weights are packed.

        A scale is rounded to it before it is used, so that the stored one is the one that counts.
        """
        if self.weight_spec(name).scale_type == "e4m3":
            weights = (self.block.linears[other].weight for other in self.merged_with(name))
            absmax = torch.stack([weight.abs().max() for weight in weights]).max()
            scale = numerics.choose_scale(absmax, numerics.FP4)
            return numerics.E4M3Multiples(numerics.e4m3_unit(scale).item())
        packed = storage.storage_format(self.scheme_of(name)) == "pack-quantized"
        return self.dtype_of(f"{name}.weight") if packed else torch.float32

    def weight_spec(self, name: str) -> WeightSpec:
        """How the weight of one of `targets` is to be stored."""
        spec = self.scheme_of(name).weights
        assert spec is not None
        return spec

    def input_absmax(self, name: str) -> float:
        """Magnitude at which a linear layer's input is clipped: the observer's, or a method's."""
        spec = self.scheme_of(name).activations
        kind = numerics.TYPES[spec.dtype] if spec is not None else numerics.INT8
        found = observers.choose_absmax(
            self.observed(name, "input"), self.settings.input_observer, kind
        )
        return found * self.clips.get(name, 1.0)


def loss_against(wanted: Tensor, sinks: int) -> Callable[[Tensor], Tensor]:
    """Squared error of one output [..., tokens, hidden] after another, by `wanted`: fp64 scalars.

    A sink token's hidden state is so much larger than all others that its error alone would
    decide. It counts by its relative error, as that of `SINK_TOKENS` ordinary tokens: most
    attention goes to it, so that all later tokens read what is wrong with it.
    """
    apart = 0 < sinks < wanted.shape[-2]
    if apart:
        powers = wanted.double().square().sum(dim=-1)
        each, own = SINK_TOKENS * powers[..., sinks:].mean(-1), powers[..., :sinks]

    def loss(found: Tensor) -> Tensor:
        errors = (found.double() - wanted).square().sum(dim=-1)
        total = errors[..., sinks:].sum()
        if apart:
            relative = (errors[..., :sinks] / own.clamp(min=1e-30)).sum(-1)
            total = total + (each * relative).sum()
        return total

    return loss


def power_of(outputs: Iterable[Tensor], sinks: int) -> float:
    """Sum of squares of outputs [..., tokens, hidden], but for sink tokens."""
    squares = (y.double().square().sum(dim=-1) for y in outputs)
    return exact_sum(own[..., sinks:].sum() for own in squares)


def exact_sum(scalars: Iterable[Tensor]) -> float:
    """The sum of scalars on one device, of any order the same; the host waits for it once."""
    found = list(scalars)
    return math.fsum(torch.stack(found).tolist()) if found else 0.0


@contextmanager
def quantized_block(work: BlockWork, *, refined: bool = False) -> Iterator[None]:
    """Let the block compute with its solved layers, for a while; its cache stays in float.

    Args:
        refined: Let gradients pass through the inputs, and leave weights of integers in float:
            whoever refines them gives their values.
    """
    with ExitStack() as stack:
        for name, layer in work.quantized.items():
            scales = (layer.input_scale, work.input_scale(name, SINK_INPUT))

            def seen(
                x: Tensor, name: str = name, scales: tuple[Tensor | None, Tensor | None] = scales
            ) -> Tensor:
                if not refined:
                    return work.seen_input(name, x, *scales)
                return x + (work.seen_input(name, x.detach(), *scales) - x.detach())

            linear = work.block.linears[name]
            floating = refined and layer.spec.dtype != "fp8_e4m3"
            weight = linear.weight if floating else layer.dequantized()
            stack.enter_context(replaced(linear, weight, seen))
        yield


@contextmanager
def replaced(
    linear: nn.Linear, weight: Tensor, on_input: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let `linear` compute with another weight and a function of its input, for a while."""
    original = linear.weight
    set_parameter(linear, "weight", weight)
    with linear.register_forward_pre_hook(lambda _, args: (on_input(args[0]), *args[1:])):
        try:
            yield
        finally:
            linear.weight = original


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module a new parameter; the old tensor is left as it is."""
    setattr(module, name, nn.Parameter(value, requires_grad=False))
