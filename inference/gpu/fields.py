"""The arrays of a step as one block of bytes: made on the host, moved to the device by one copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod

import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.scheduling.work import Work

Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]
Arrays = Mapping[str, NDArray]
BLOCKS = 2  # of each kind: one is written while the other is on its way


class HostBlock:
    """A step's arrays as a block of bytes on the host.

    Args:
        shapes: Type and shape of each.
        pinned: Whether the block is to be moved without waiting.

    Attributes:
        bytes: uint8, one dimension; zero at first.
        arrays: The arrays in it, by name.
        moved: When its bytes have been moved; None if nobody moves them.
        launched: The work whose arrays it holds, once that is launched; None before.
    """

    def __init__(self, shapes: Shapes, *, pinned: bool) -> None:
        self.bytes = torch.zeros(_size(shapes), dtype=torch.uint8, pin_memory=pinned)
        self.arrays: Arrays = {k: v.numpy() for k, v in _views(self.bytes, shapes).items()}
        self.moved: torch.cuda.Event | None = None
        self.launched: Work | None = None


class HostBlocks:
    """Blocks that are written again and again, in turn; a step's arrays cost no allocation.

    Args:
        pinned: Whether they are to be moved without waiting.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._kinds: dict[Hashable, list[HostBlock]] = {}

    def next(self, kind: Hashable, shapes: Callable[[], Shapes]) -> HostBlock:
        """A block that nobody reads any more; what it holds is of an earlier step of its kind.

        Args:
            kind: All blocks of a kind have the same shapes.
            shapes: What these are, asked for the first of a kind.
        """
        blocks = self._kinds.setdefault(kind, [])
        if len(blocks) < BLOCKS:
            blocks.append(HostBlock(shapes(), pinned=self._pinned))
        else:
            blocks.append(blocks.pop(0))
        if (moved := blocks[-1].moved) is not None and not moved.query():
            moved.synchronize()  # rare: a step is read before the next but one is planned
        return blocks[-1]


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
        """Fill the arrays from the bytes of a `HostBlock` of the same shapes; does not wait."""
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
