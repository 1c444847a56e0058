"""Linear layers of the experts of a mixture on a GPU: side by side in memory, run as one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from inference.gpu.layers import GpuLinear, workspace_on
from kernels.triton.fused import quantize_rows
from kernels.triton.linear import GpuWeight, Rows, linear, takes_strips
from kernels.triton.strips import Strips

log = logging.getLogger("ptq.inference")


@dataclass(frozen=True)
class GpuExperts:
    """The same linear layer of each expert of a mixture.

    Attributes:
        weight: The first one's; the others lie behind it, in order.
        rows: How inputs are given to `run`: `scale` is None, or has one element or one for each
            expert.
    """

    weight: GpuWeight
    rows: Rows

    def scaled_by(self, chosen: Tensor) -> Tensor | None:
        """`chosen`, the experts of pairs, where each has an input scale of its own."""
        scale = self.rows.scale
        return chosen if scale is not None and scale.numel() > 1 else None

    def quantized(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows [T, K] as `run` takes them, or [P, K] where experts scale them, and their scales."""
        own = self.rows
        if own.dtype == x.dtype:
            return x.contiguous(), None
        by = self.scaled_by(chosen)
        return quantize_rows(x.contiguous(), own.scale, own.dtype, own.group, by)

    def run(
        self, rows: Tensor, scales: Tensor | None, strips: Strips, dtype: torch.dtype
    ) -> Tensor:
        """What the pairs' experts make of rows of tokens or pairs: [P, N] in `dtype`."""
        return linear(rows, scales, self.weight, workspace_on(rows.device), dtype, strips)


def side_by_side(
    layers: Iterable[GpuLinear], count: int, name: str
) -> tuple[list[GpuLinear], GpuExperts | None]:
    """Move layers, as they come, to one piece of memory: two are held twice at no time.

    Args:
        layers: So many, each packed for its kernel.
        count: How many.
        name: What they are, for the log.

    Returns:
        The layers there, and all as one; None where they are not packed alike, or for no kernel
        that takes some rows of each. Why is logged.
    """
    moved: list[GpuLinear] = []
    memory: dict[str, Tensor] = {}
    why = ""
    for layer in layers:
        own = dict(_tensors(layer.weight))
        if not moved:
            memory = {key: _room_for(t, count) for key, t in own.items()}
        if moved and not why and not _alike(moved[0], layer):
            why = "they are not packed alike"
        if not why:
            views = {key: memory[key][len(moved)] for key in own}
            for key, view in views.items():
                view.copy_(own[key])
            layer = replace(layer, weight=replace(layer.weight, **views))
        moved.append(layer)
    if not why and not takes_strips(moved[0].weight):
        why = "no kernel takes rows of each at once"
    if why:
        log.warning("%s: %s; experts run one by one, and steps without CUDA graphs", name, why)
        return moved, None
    return moved, GpuExperts(moved[0].weight, _rows(moved))


def _tensors(weight: GpuWeight) -> Iterator[tuple[str, Tensor]]:
    for field in fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _room_for(tensor: Tensor, count: int) -> Tensor:
    """Memory of so many tensors, each as this one lies."""
    strides = (tensor.numel(), *tensor.stride())
    return torch.empty_strided(
        (count, *tensor.shape), strides, dtype=tensor.dtype, device=tensor.device
    )


def _alike(one: GpuLinear, other: GpuLinear) -> bool:
    """Whether two layers differ in nothing but values."""
    return _form(one) == _form(other)


def _form(layer: GpuLinear) -> list:
    values = [getattr(layer.weight, field.name) for field in fields(layer.weight)]
    forms = [(v.dtype, v.shape) if isinstance(v, Tensor) else v for v in values]
    own = layer.rows
    return [type(layer.weight), forms, own.dtype, own.group, own.scale is None]


def _rows(layers: list[GpuLinear]) -> Rows:
    """How all want their input: a scale for each expert becomes one where it is the same."""
    first = layers[0].rows
    if first.scale is None:
        return first
    scales = torch.stack([layer.rows.scale.reshape(()) for layer in layers])  # pyright: ignore[reportOptionalMemberAccess]
    return first if bool((scales == scales[0]).all()) else replace(first, scale=scales)
