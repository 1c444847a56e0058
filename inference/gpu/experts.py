"""Linear layers of the experts of a mixture on a GPU: side by side in memory, run as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from inference.gpu.layers import GpuLinear, as_wanted, warn_of, workspace_on
from kernels.triton.experts.sorting import SortedRows
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.weight import GpuWeight, InputFormat


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
            own = sinks.repeat_interleave(
                len(chosen) // len(sinks), output_size=len(chosen)
            )  # of each pair
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
