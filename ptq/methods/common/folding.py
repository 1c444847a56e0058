"""Folding factors into a block: a source is divided, its consumers are multiplied.

Norm weights and biases are stored in the checkpoint's type. The factor that counts is therefore
not s but old / rounded(old / s): consumers are multiplied by that, and rounding costs nothing. Of a
norm that multiplies by 1 + w, what is divided is 1 + w, and (1 + w) / s - 1 is stored. Rows of v
and up are quantized per output channel, so their scales absorb any factor; where these two
stay in float and the cached V alone is rounded, factors are powers of two.

In a mixture of experts, norm -> gate, up goes to all experts of a block, and to its routers. These
stay in float and are stored in the checkpoint's type, so here factors are powers of two: they
multiply a router's weight without rounding, and each token goes where it went, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calibrate.spec import SINK_INPUT
from formats.families.block_layers import SmoothingGroup
from formats.namespace import later
from ptq.methods.common.block import (
    BlockWork,
    QuantizedLinear,
    exact_sum,
    loss_against,
    power_of,
    replaced,
    set_parameter,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.block import DecoderBlock
with later():
    import torch
    from torch import nn

    import kernels.numerics as numerics
    from calibrate import replay
    from ptq.methods.common import cache, rounding

SMALL = 1 << 22  # weights that a GPU rounds faster than it is told to
FEW = 4  # channels in which a sink token may be far larger than in all others


def fold_vector(
    vector: Tensor, scale: Tensor, dtype: torch.dtype, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Divide a stored vector by `scale` and find the factor that its rounding made of it.

    Args:
        vector: Norm weight or bias [channels], exactly representable in `dtype`.
        scale: Wanted factors [channels].
        dtype: Element type of the checkpoint.
        offset: What is added to the vector where it is used.

    Returns:
        (v in `dtype` with v + offset near (vector + offset) / scale, effective factors [channels]
        fp64): (v + offset) times these is vector + offset exactly. A channel whose quotient leaves
        the range of `dtype` keeps its value and factor 1; one that only the offset hides gets the
        smallest v + offset of its sign that is surely not hidden.
    """
    exact = vector.double() + offset
    folded = (exact / scale - offset).to(dtype)
    if offset:
        least = exact.sign() * torch.finfo(dtype).eps * offset
        hidden = (exact != 0) & (folded.double() + offset == 0)
        folded = torch.where(hidden, least - offset, folded.double()).to(dtype)
    held = folded.double() + offset
    effective = exact / held
    out_of_range = (exact != 0) & ((held == 0) | torch.isinf(folded))
    effective = torch.where(exact == 0, scale.double(), effective)
    return (
        torch.where(out_of_range, vector.to(dtype), folded),
        torch.where(out_of_range, torch.ones_like(effective), effective),
    )


@dataclass(frozen=True)
class Folding:
    """A group's factors as they can be stored.

    Attributes:
        scale: Effective factor of each source channel [channels] fp64.
        vector: The source's norm weight or bias after division, in the checkpoint's type; None
            where the source is a linear layer without bias.
    """

    scale: Tensor
    vector: Tensor | None


class SmoothedGroup:
    """One group of a block: its ranges, and trials of its factors."""

    def __init__(self, work: BlockWork, group: SmoothingGroup) -> None:
        self.work, self.group = work, group
        self.source = work.module(group.source)
        self.consumers = [work.block.linears[name] for name in group.consumers]
        self.routers = {name: work.module(name) for name in group.routers}
        channels = self.source.get_parameter("weight").shape[0]
        self.channel = source_channel(
            channels, self.consumers[0].in_features, work.settings.head_dim
        )
        self.in_float = group.consumers[0] not in work.targets  # the cached V alone is rounded
        if self.in_float:
            v = work.observed(work.block.attended, "v_cache")
            self.x_absmax = v.channel_absmax.flatten().double()
        else:
            seen = work.observed(group.consumers[0], "input")
            self.x_absmax = self._by_channel(seen.channel_absmax, channels)
        columns = torch.stack([linear.weight.abs().amax(dim=0) for linear in self.consumers])
        self.w_absmax = self._by_channel(columns.amax(dim=0).cpu(), channels)
        self.sink_absmax = None
        if work.block.sinks and not self.in_float:
            sinks = work.observed(group.consumers[0], SINK_INPUT).channel_absmax
            self.sink_absmax = self._by_channel(sinks, channels)

    def _by_channel(self, absmax: Tensor, channels: int) -> Tensor:
        """Maximum over the consumers' input channels that read one source channel."""
        zero = torch.zeros(channels, dtype=torch.float64)
        return zero.scatter_reduce(0, self.channel, absmax.double(), "amax")

    def protected(self, scale: Tensor) -> Tensor:
        """Factors that leave sink tokens room in channels in which they are far larger.

        Ordinary tokens may hardly use such a channel: its factor would be small, the column it
        multiplies nearly nothing beside the others of a row, and rounded to nothing. A sink token's
        output is little else than that column. It gets the range of a middling column at least.

        Where inputs are scaled by token, a sink token's largest channels set its scale: beside them
        its others have few steps or none, and all later tokens read what is wrong with it. Factors
        of those in which it is larger than ordinary tokens grow until it is no larger there than in
        the channel after its first `FEW`, or their columns are as large as the largest.

        Args:
            scale: Wanted factors [channels] fp64.
        """
        if self.sink_absmax is None:
            return scale
        massive = (self.sink_absmax > self.x_absmax.max()) & (self.w_absmax > 0)
        middle = (self.w_absmax * scale).median()
        scale = torch.where(massive, scale.maximum(middle / self.w_absmax), scale)
        inputs = self.work.scheme_of(self.group.consumers[0]).activations
        if inputs is None or not inputs.dynamic or len(scale) <= FEW:
            return scale
        sinks, columns = self.sink_absmax / scale, self.w_absmax * scale
        excess = sinks / sinks.sort(descending=True).values[FEW]
        grown = scale * torch.minimum(excess, columns.max() / columns).clamp(min=1.0)
        larger = (self.sink_absmax > self.x_absmax) & (columns > 0)
        return torch.where(larger, grown, scale)

    def mean_by_channel(self, values: Tensor) -> Tensor:
        """Mean over the consumers' input channels that read one source channel: fp64."""
        zero = torch.zeros_like(self.x_absmax)
        return zero.scatter_reduce(0, self.channel, values.double(), "mean", include_self=False)

    @property
    def vector_name(self) -> str | None:
        """Full name of the stored vector that is divided: norm weight or bias, if there is one."""
        if not isinstance(self.source, nn.Linear):
            return f"{self.group.source}.weight"
        return f"{self.group.source}.bias" if self.source.bias is not None else None

    def fold(self, scale: Tensor | None) -> Folding:
        """Wanted factors [channels] fp64 (None: all 1), as they can be stored without loss."""
        if scale is None:
            return Folding(torch.ones_like(self.x_absmax), None)
        if self.routers or self._norm_bias is not None or self.in_float:
            scale = self._exact_for_routers(power_of_two(scale))
        if self.in_float:  # only ratios matter, and fp16 holds no numbers that are far smaller
            scale = scale / scale.log2().mean().round().exp2()
        if self.vector_name is None:
            return Folding(scale, None)
        vector = self.source.get_parameter(self.vector_name.rpartition(".")[2]).cpu()
        dtype = self.work.dtype_of(self.vector_name)
        folded, effective = fold_vector(vector, scale, dtype, self.group.offset)
        return Folding(effective, folded)

    @property
    def _norm_bias(self) -> Tensor | None:
        """The source's bias where it is a LayerNorm: divided by powers of two, without rounding."""
        bias = getattr(self.source, "bias", None)
        return None if isinstance(self.source, nn.Linear) else bias

    def _exact_for_routers(self, scale: Tensor) -> Tensor:
        """The factors, 1 for channels in which a router's weight could not be stored without loss.

        Only numbers at the ends of the range of fp16 make such channels.
        """
        for name, router in self.routers.items():
            moved = router.get_parameter("weight").cpu().double() * scale
            stored = moved.to(self.work.dtype_of(f"{name}.weight")).double()
            scale = torch.where((stored == moved).all(dim=0), scale, 1.0)
        return scale

    @property
    def simulated_modules(self) -> list[nn.Module]:
        """The modules that compute otherwise while it is `simulated`."""
        v = [self.source] if smooths_v(self.work, self.group) else []
        return [*v, *self.consumers]

    def commit(self, folding: Folding) -> None:
        """Divide the source and multiply the consumers, in the block's float weights."""
        if isinstance(self.source, nn.Linear):
            rows = self.source.weight.double() / folding.scale[:, None].to(self.work.block.device)
            self._put(self.group.source, rows.float())
            self.work.divide(self.group.source, "output", folding.scale)
        if folding.vector is not None and self.vector_name is not None:
            self.work.store(self.vector_name, folding.vector)
        if (bias := self._norm_bias) is not None:
            self.work.store(f"{self.group.source}.bias", bias.double().cpu() / folding.scale)
        for name, linear in zip(self.group.consumers, self.consumers, strict=True):
            self._put(name, self._smoothed_weight(linear.weight, folding))
            self.work.divide(name, "input", folding.scale[self.channel])
        for name, router in self.routers.items():
            moved = self._smoothed_weight(router.get_parameter("weight"), folding)
            set_parameter(router, "weight", moved)
            stored = f"{name}.weight"
            self.work.folded[stored] = moved.to(self.work.dtype_of(stored)).cpu()
        if self.group.kind == "attention_output":
            heads = folding.scale.view(-1, self.work.settings.head_dim)
            self.work.divide(self.work.block.attended, "v_cache", heads)

    def _put(self, name: str, weight: Tensor) -> None:
        if self.in_float:
            self.work.store(f"{name}.weight", weight)
        else:
            set_parameter(self.work.module(name), "weight", weight)

    def _smoothed_weight(self, weight: Tensor, folding: Folding) -> Tensor:
        """A consumer's weight with its columns multiplied: fp32 [out, in]."""
        return (weight.double() * folding.scale[self.channel].to(weight.device)).float()

    @contextmanager
    def simulated(self, folding: Folding) -> Iterator[None]:
        """Let the consumers compute as they will once they are smoothed and quantized."""
        work = self.work
        inputs: dict[object, Callable[[Tensor], Tensor]] = {}
        with ExitStack() as stack:
            weights = zip(self.consumers, self._rounded_weights(folding), strict=True)
            each = zip(self.group.consumers, weights, strict=True)
            for name, (linear, weight) in () if self.in_float else each:
                alike = work.scheme_of(name).activations, bool(work.block.expert_of(name))
                if alike not in inputs:
                    inputs[alike] = self._simulated_input(name, folding)
                stack.enter_context(replaced(linear, weight, inputs[alike]))
            if smooths_v(self.work, self.group):
                stack.enter_context(self._quantized_v(folding))
            yield

    def _rounded_weights(self, folding: Folding) -> Iterator[Tensor]:
        """The consumers' weights, smoothed and rounded; small ones of one scheme at once."""
        work, own = self.work, [linear.weight for linear in self.consumers]
        kinds = [(work.weight_spec(n), work.scale_dtype(n)) for n in self.group.consumers]
        joined = len(set(kinds)) == 1 and kinds[0][0].granularity == "per_channel"
        joined = joined and sum(weight.numel() for weight in own) <= SMALL
        for weight, (spec, dtype) in zip([torch.cat(own)] if joined else own, kinds, strict=False):
            stored = rounding.round_weight(self._smoothed_weight(weight, folding), spec, dtype)
            rounded = QuantizedLinear(stored, spec, None).dequantized()
            yield from rounded.split([len(each) for each in own]) if joined else [rounded]

    def _simulated_input(self, name: str, folding: Folding) -> Callable[[Tensor], Tensor]:
        """What the kernels will see of a consumer's input; found once for all that read it."""
        work, spec = self.work, self.work.scheme_of(name).activations
        divisor = folding.scale[self.channel].float().to(work.block.device)  # [in]
        scales: list[Tensor | None] = [None, None]  # of ordinary tokens, and of sink tokens
        if spec is not None and not spec.dynamic:
            sinks = self.x_absmax if self.sink_absmax is None else self.sink_absmax
            tops = ((top / folding.scale).max().float() for top in (self.x_absmax, sinks))
            kind = numerics.TYPES[spec.dtype]
            scales = [numerics.choose_scale(top, kind).to(work.block.device) for top in tops]
        last: list[Tensor] = []  # the input that was seen last, and what of it

        def seen(x: Tensor) -> Tensor:
            if not last or last[0] is not x:
                last[:] = x, work.seen_input(name, x / divisor, *scales)
            return last[1]

        return seen

    @contextmanager
    def _quantized_v(self, folding: Folding) -> Iterator[None]:
        """Let V pass through the cache: smoothed, rounded with static scales, and back."""
        spec = self.work.scheme.kv_cache
        assert spec is not None
        shape = (-1, self.work.settings.head_dim)  # [kv heads, head_dim]
        observed = self.work.observed(self.work.block.attended, "v_cache")
        absmax = observed.channel_absmax.double() / folding.scale.view(shape)
        factor = folding.scale.view(shape).float().to(self.work.block.device)

        def stored(_: nn.Module, __: tuple, v: Tensor) -> Tensor:
            heads = v.unflatten(-1, factor.shape) / factor  # [..., tokens, kv heads, head_dim]
            held = cache.through_cache(heads, absmax, spec, "v_cache", self.work.block.sinks)
            return (held * factor).reshape(v.shape)

        with self.source.register_forward_hook(stored):
            yield


class Trials:
    """Errors of a block's hidden states, with factors of some of its groups as they might be.

    Of groups in attention they are those that attention leaves to the feed-forward layer, of others
    the block's outputs: the feed-forward layer, two thirds of a block's products, need not run to
    tell what attention has lost.

    Attributes:
        groups: They are tried together.
        reference: The float block's hidden states for each input.
        power: Sum of their squares.
    """

    def __init__(
        self,
        groups: Sequence[SmoothedGroup],
        reference: Sequence[Tensor],
        block: DecoderBlock | None = None,
    ) -> None:
        """Compare with what a block's inputs gave; by default the groups' own block's."""
        self.groups = groups
        work, modules = groups[0].work, [m for g in groups for m in g.simulated_modules]
        attention = all(group.group.kind.startswith("attention") for group in groups)
        until = work.feed_forward_norm if attention else None
        self._runs = replay.Replay(block or work.block, modules, until)
        samples = range(len(reference))
        self.reference = reference if until is None else [self._runs.run(i) for i in samples]
        self.power = power_of(self.reference, work.block.sinks)
        self._losses = [loss_against(y, work.block.sinks) for y in self.reference]

    def error(self, foldings: Sequence[Folding]) -> float:
        """`loss_against` of the hidden states, the groups' factors as `foldings` say.

        Summed exactly over samples, so that their order does not matter.
        """
        with ExitStack() as stack:
            for group, folding in zip(self.groups, foldings, strict=True):
                stack.enter_context(group.simulated(folding))
            return exact_sum(loss(self._runs.run(i)) for i, loss in enumerate(self._losses))


def smooths_v(work: BlockWork, group: SmoothingGroup) -> bool:
    """Whether what is divided passes through a quantized cache."""
    return group.kind == "attention_output" and work.scheme.kv_cache is not None


def power_of_two(scale: Tensor) -> Tensor:
    """The powers of two nearest to positive numbers, by their ratio; exact."""
    mantissa, _ = torch.frexp(scale)  # in [1/2, 1)
    above = scale / mantissa
    return torch.where(mantissa < math.sqrt(0.5), above / 2, above)


def source_channel(source_channels: int, inputs: int, head_dim: int) -> Tensor:
    """Which channel of the source each input channel of a consumer reads: int64 [inputs].

    They are the same but for v -> o under grouped-query attention, where consecutive query heads
    share one KV head.
    """
    index = torch.arange(inputs)
    if inputs == source_channels:
        return index
    queries_per_kv = inputs // source_channels
    return index // (head_dim * queries_per_kv) * head_dim + index % head_dim
