"""Feed-forward layers of a step on a GPU: a gated MLP, or a mixture of them.

The experts of a mixture lie side by side in memory and run as one, on rows that are sorted on the
device (`kernels.triton.experts`): nothing is asked of the host, and a step can be captured.
Only many tokens of prompts go through large experts one by one, in steps that are not captured:
there the kernels for many rows are ahead by more than launches cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from inference.gpu.adapters import BlockAdapters, run_adapted
from inference.gpu.layers import GpuLinear, as_wanted, warn_of, workspace_on
from inference.models.layers import GatedMLP, MixtureOfExperts, by_expert
from kernels.op_inputs import Activation
from kernels.triton.experts import SortedRows, combine, route, sort_by_expert
from kernels.triton.fused import gated_product, quantize_rows
from kernels.triton.linear.weight import GpuWeight, InputFormat
from kernels.triton.tuning import fewest_rows, power_of_two


@dataclass(frozen=True)
class MergedExperts:
    """The same linear layer of each expert of a mixture, run as one.

    Attributes:
        weight: The first one's; the others lie after it, in order.
        rows: How inputs are given to `run`: `scale` is None, or has one element or one for each
            expert.
        outputs: As of `GpuLinear`.
    """

    weight: GpuWeight
    rows: InputFormat
    outputs: int | None = None

    def scaled_by(
        self, chosen: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scales of the inputs of pairs, and which of them is each one's; see `InputFormat`.

        Args:
            chosen: int32 [P], the experts of pairs, token by token.
            sinks: int32 [T], 1 for the rows of sink tokens; None where none is.
        """
        scale, both = self.rows.scale, self.rows.both
        if both is not None and sinks is not None:
            count = len(chosen)
            own = sinks.repeat_interleave(count // len(sinks), output_size=count)  # of each pair
            each = both.numel() // 2
            return both, own if each == 1 else chosen + each * own
        return scale, chosen if scale is not None and scale.numel() > 1 else None

    def quantized(
        self, x: Tensor, chosen: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows [T, K] as `run` takes them, or [P, K] where experts scale them, and their scales."""
        own = self.rows
        if own.dtype == x.dtype or own.scale is None or own.scale.numel() == 1:
            return as_wanted(x, own, sinks)
        scale, by = self.scaled_by(chosen, sinks)
        return quantize_rows(x.contiguous(), scale, own.dtype, own.group, by, own.length)

    def run(
        self, rows: Tensor, scales: Tensor | None, sorted_rows: SortedRows, dtype: torch.dtype
    ) -> Tensor:
        """What the pairs' experts make of rows of tokens or pairs: [P, N] in `dtype`."""
        y = self.weight.run(rows, scales, workspace_on(rows.device), dtype, sorted_rows)
        return y if self.outputs is None else y[:, : self.outputs].contiguous()


@dataclass(frozen=True)
class GpuExperts:
    """The same linear layer of each expert of a mixture, in the router's order.

    Attributes:
        each: One by one.
        merged: All as one, in the same memory; None where there is no kernel for that.
    """

    each: Sequence[GpuLinear]
    merged: MergedExperts | None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(layer.nbytes for layer in self.each)


def side_by_side(stacks: Iterable[tuple[GpuLinear, str]], count: int) -> GpuExperts:
    """Move layers, as they come, to one piece of memory: no two stacks are held twice at a time.

    They are not merged where they are not packed alike, or for no kernel that takes some rows of
    each; why is logged.

    Args:
        stacks: Some of the layers each, packed by one call, and the name of their first module.
        count: How many layers there are.
    """
    layers: list[GpuLinear] = []
    memory: dict[str, Tensor] = {}
    form, first_name, why = [], "", ""
    for stack, name in stacks:
        first_name = first_name or name
        size = len(next(iter(stack.weight.tensors().values())))
        if not layers and size < count:
            memory = {key: _room_for(own, count) for key, own in stack.weight.tensors().items()}
        form = form or _form(stack)
        if _form(stack) != form:
            why = "they are not packed alike"
        if memory and not why:
            places = {key: room[len(layers) : len(layers) + size] for key, room in memory.items()}
            stack = _moved(stack, places)
        layers += _apart(stack, size)
    first = layers[0]
    if not why and first.order is not None:
        why = "each takes its inputs in an order of its own (act-order)"
    if not why and not first.weight.takes_sorted_rows:
        why = "no kernel takes rows of each at once"
    if why:
        warn_of(
            [[first_name]] * count, f"{why}; experts run one by one, and steps without CUDA graphs"
        )
        return GpuExperts(layers, None)
    merged = MergedExperts(first.weight, _rows([own.rows for own in layers]), first.outputs)
    return GpuExperts(layers, merged)


def _room_for(stack: Tensor, count: int) -> Tensor:
    """Memory of so many tensors, each as those of a stack lie."""
    one = stack[0]
    strides = (one.numel(), *one.stride())
    return torch.empty_strided((count, *one.shape), strides, dtype=one.dtype, device=one.device)


def _moved(stack: GpuLinear, places: Mapping[str, Tensor]) -> GpuLinear:
    for key, place in places.items():
        place.copy_(getattr(stack.weight, key))
    return replace(stack, weight=replace(stack.weight, **places))


def _apart(stack: GpuLinear, size: int) -> list[GpuLinear]:
    """The layers of a stack, each of which sees its own part of every tensor."""
    parts = {key: tensor.unbind() for key, tensor in stack.weight.tensors().items()}
    scale, both = stack.rows.scale, stack.rows.both
    rows = [stack.rows] * size
    if scale is not None:
        pairs = [None] * size if both is None else both.unbind()
        rows = [
            replace(stack.rows, scale=own, both=pair)
            for own, pair in zip(scale.unbind(), pairs, strict=True)
        ]
    orders = [None] * size if stack.order is None else stack.order.unbind()
    weights = [
        replace(stack.weight, **{key: own[i] for key, own in parts.items()}) for i in range(size)
    ]
    each = zip(weights, rows, orders, strict=True)
    return [GpuLinear(*own, stack.outputs, stack.missing) for own in each]


def _form(stack: GpuLinear) -> list:
    """All of a stack but how many and which values it holds."""
    values = [getattr(stack.weight, field.name) for field in fields(stack.weight)]
    forms = [(v.dtype, v.shape[1:]) if isinstance(v, Tensor) else v for v in values]
    own = stack.rows
    ordered = stack.order is not None
    filled = own.length, stack.outputs, stack.missing
    return [type(stack.weight), forms, own.dtype, own.group, own.scale is None, ordered, *filled]


def _rows(each: Sequence[InputFormat]) -> InputFormat:
    """How all want their input: a scale for each expert becomes one where it is the same."""
    first = each[0]
    scales = [own.scale for own in each if own.scale is not None]
    if not scales:
        return first
    ordinary, sinks = torch.stack(scales).flatten(), None
    same = (ordinary == ordinary[0]).all()
    if any(own.both is not None for own in each):
        own_of_sinks = zip(each, scales, strict=True)
        sinks = torch.stack(
            [scale if own.both is None else own.both[1] for own, scale in own_of_sinks]
        )
        same = same & (sinks == sinks[0]).all()
    if bool(same):
        return first
    both = None if sinks is None else torch.cat((ordinary, sinks.flatten()))
    return replace(first, scale=ordinary, both=both)


GpuFeedForward = GatedMLP[GpuLinear] | MixtureOfExperts[GpuLinear, GpuExperts]
MANY_ROWS = 64  # an expert, on average
LARGE = 16 << 20  # bytes of an expert's gate and up


def as_one(own: GpuFeedForward, tokens: int | None) -> bool:
    """Whether experts run as one, without the host, in a step of so many tokens of prompts.

    In one without prompts, `tokens` None, they do wherever they can; dense layers always.
    """
    if isinstance(own, GatedMLP):
        return True
    gate_up = own.gate_up.merged
    if gate_up is None or own.down.merged is None:
        return False
    few = tokens is None or tokens * own.routing.chosen <= MANY_ROWS * own.routing.experts
    return few or gate_up.weight.nbytes < LARGE


def inputs_of(own: GpuFeedForward, dtype: torch.dtype) -> InputFormat:
    """How the layer wants its input; mixtures quantize their rows themselves."""
    return own.gate_up.rows if isinstance(own, GatedMLP) else InputFormat(dtype)


def feed_forward(
    own: GpuFeedForward,
    rows: Tensor,
    scales: Tensor | None,
    dtype: torch.dtype,
    padded: bool,
    sinks: Tensor | None = None,
    loras: BlockAdapters | None = None,
) -> Tensor:
    """The layer on rows that are as it wants them: [T, H] in `dtype`.

    Args:
        rows: [T, H].
        scales: Of the rows, where they are quantized.
        dtype: The model's float type.
        padded: Whether the step may be captured.
        sinks: int32 [T], 1 for the rows of sink tokens; None where none is.
        loras: Adapters of a gated MLP, if rows run with any.
    """
    if isinstance(own, GatedMLP):
        y = run_adapted(own.gate_up, "gate_up", rows, scales, dtype, loras)
        return _down(own, y, sinks, loras)
    return _mixture(own, rows, padded, sinks)


def _on_floats(own: GatedMLP[GpuLinear], x: Tensor, sinks: Tensor | None) -> Tensor:
    return _down(own, own.gate_up(x, sinks), sinks)


def _down(
    own: GatedMLP[GpuLinear],
    y: Tensor,
    sinks: Tensor | None,
    loras: BlockAdapters | None = None,
) -> Tensor:
    """The layer from what gate and up say on."""
    wanted = own.down.rows
    scale, by = wanted.scales_of(sinks)
    rows, scales = gated_product(
        y, scale, wanted.dtype, wanted.group, by, own.activation, wanted.length
    )
    return run_adapted(own.down, "down", rows, scales, y.dtype, loras)


def _mixture(
    own: MixtureOfExperts[GpuLinear, GpuExperts], x: Tensor, padded: bool, sinks: Tensor | None
) -> Tensor:
    routing = own.routing
    logits = own.router(x, dtype=torch.float32)
    weights, chosen = route(
        logits, routing.chosen, routing.normalized, sigmoid=routing.scores == "sigmoid",
        correction=own.correction, groups=routing.groups, chosen_groups=routing.chosen_groups,
        best_of_group=routing.best_of_group, factor=routing.factor,
    )  # fmt: skip
    gate_up, down = own.gate_up.merged, own.down.merged
    if gate_up is None or down is None or not (padded or as_one(own, len(x))):
        pairs = zip(own.gate_up.each, own.down.each, strict=True)
        experts = [GatedMLP(*pair, own.activation) for pair in pairs]

        def run(expert: GatedMLP[GpuLinear], tokens: Tensor) -> Tensor:
            return _on_floats(expert, x[tokens], None if sinks is None else sinks[tokens])

        y = by_expert(x, chosen, experts, run).flatten(0, 1)
    else:
        y = _all_at_once(gate_up, down, x, chosen, routing.experts, own.activation, sinks)
    if own.shared is None:
        return combine(y, weights)
    gate = None if own.shared_gate is None else own.shared_gate(x)
    return combine(y, weights, _on_floats(own.shared, x, sinks), gate)


def _all_at_once(
    gate_up: MergedExperts,
    down: MergedExperts,
    x: Tensor,
    chosen: Tensor,
    experts: int,
    activation: Activation = "silu",
    sinks: Tensor | None = None,
) -> Tensor:
    """What the experts of each pair say: [T k, H]."""
    weights = gate_up.weight, down.weight
    tallest = min(weight.tallest_tile for weight in weights)
    shortest = max(fewest_rows(weight.family) for weight in weights)
    height = tile_height(chosen.numel(), experts, tallest, shortest)
    pairs, numbers = sort_by_expert(chosen, experts, height), chosen.view(-1)
    ready = replace(pairs, metadata_ready=True)
    rows, scales = gate_up.quantized(x, numbers, sinks)
    y = gate_up.run(rows, scales, pairs if rows is x else ready, x.dtype)
    wanted = down.rows
    scale, by = down.scaled_by(numbers, sinks)
    rest = (scale, wanted.dtype, wanted.group, by, activation, wanted.length)
    rows, scales = gated_product(y, *rest)
    return down.run(rows, scales, ready, x.dtype)


def tile_height(pairs: int, experts: int, tallest: int, shortest: int) -> int:
    """Rows of a tile: twice as many as an expert has on average, so that few have two tiles.

    Of more than 64 products of a row cost more than weights: no more are wasted than there.
    """
    mean = pairs // experts
    rows = max(power_of_two(2 * mean + 1), shortest)
    return min(rows, 64 if mean < 128 else 128, tallest)
