"""The arrays of a step as one block of bytes: made on the host, moved to the device by one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]


def pack_fields(shapes: Shapes, values: Mapping[str, Sequence], *, pinned: bool) -> Tensor:
    """A step's arrays as a block of bytes on the host.

    Args:
        shapes: Type and shape of each.
        values: What each array begins with; the rest of it is zero.
        pinned: Whether the block is to be moved without waiting.

    Returns:
        uint8, one dimension.
    """
    block = torch.zeros(_size(shapes), dtype=torch.uint8, pin_memory=pinned)
    arrays = _views(block, shapes)
    for name, rows in values.items():
        array = arrays[name].numpy()
        if array.ndim == 1:
            array[: len(rows)] = rows
            continue
        for i, row in enumerate(rows):
            array[i, : len(row)] = row
    return block


class Fields:
    """Named arrays in one block of bytes on the device.

    Args:
        shapes: Type and shape of each.
        device: Where they go.

    Attributes:
        on_device: The arrays there.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._bytes = torch.empty(_size(shapes), dtype=torch.uint8, device=device)
        self.on_device = _views(self._bytes, shapes)

    def upload(self, block: Tensor) -> None:
        """Fill the arrays from a block of `pack_fields` of the same shapes; does not wait."""
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
