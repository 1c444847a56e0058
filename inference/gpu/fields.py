"""The arguments of a step: arrays that go to the device together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]


class Fields:
    """Named arrays in one block of bytes, filled on the host and moved to the device by one copy.

    Args:
        shapes: Type and shape of each.
        device: Where they go.

    Attributes:
        on_device: The arrays there.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._shapes = shapes
        self._bytes = torch.empty(_size(shapes), dtype=torch.uint8, device=device)
        self.on_device = _views(self._bytes, shapes)

    def upload(self, values: Mapping[str, Sequence]) -> None:
        """Set the beginning of each array named to its values, the rest to zero; does not wait."""
        pinned = self._bytes.is_cuda
        block = torch.zeros(len(self._bytes), dtype=torch.uint8, pin_memory=pinned)
        arrays = _views(block, self._shapes)
        for name, rows in values.items():
            array = arrays[name].numpy()
            if array.ndim == 1:
                array[: len(rows)] = rows
                continue
            for i, row in enumerate(rows):
                array[i, : len(row)] = row
        self._bytes.copy_(block, non_blocking=True)


def _size(shapes: Shapes) -> int:
    return sum(_padded(dtype, shape) for dtype, shape in shapes.values())


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * prod(shape) // 16) * 16


def _views(block: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    found, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = dtype.itemsize * prod(shape)
        found[name] = block[start : start + size].view(dtype).view(shape)
        start += _padded(dtype, shape)
    return found
