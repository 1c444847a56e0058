"""What conversions share: the walk over a folder, and the comparison with the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import CheckpointError
from formats.foreign.folder import owner
from formats.foreign.layout import used_groups
from formats.scheme import Strict
from formats.stored.weights import StoredWeight


class Source(Protocol):
    """A folder whose tensors are read one by one."""

    config: dict[str, Any]

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor from its file."""
        ...


class Conversion(Strict):
    """What a conversion did.

    Attributes:
        modules: Quantized layers.
        scale_rounding: Largest relative difference of a scale from its source; of a weight where
            the target is a float model.
        rounded: Whether weights were rounded to integers.
        notes: What the reader of the new folder should know, each a sentence.
    """

    modules: int
    scale_rounding: float
    rounded: bool = False
    notes: tuple[str, ...]


def unquantized(source: Checkpoint, modules: Sequence[str]) -> tuple[str, ...]:
    """Linear layers left alone: full names of the other matrices, without embeddings."""
    taken = {f"{module}.weight" for module in modules}
    return tuple(
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight")
        and name not in taken
        and len(source.shape(name)) == 2
        and "embed" not in name
    )


def parts(
    source: Source, modules: Sequence[str], title: str, progress: bool
) -> Iterator[tuple[str, str | None]]:
    """Tensors to copy, with None, and each quantized layer once, with its name."""
    quantized, seen = set(modules), set()
    for name in bar(source.names(), title=title, unit="tensor", shown=progress):
        module = owner(name, quantized)
        if module is None or name == f"{module}.bias":
            yield name, None
        elif module not in seen:
            seen.add(module)
            yield name, module


def compare(module: str, old: StoredWeight, new: StoredWeight) -> float:
    """Refuse other integers; returns the largest relative difference of the scales."""
    require_same(f"{module}: weight", old.q, new.q)
    require_same(f"{module}: zero points", zero_points(old), zero_points(new))
    if torch.equal(old.scale, new.scale):
        return 0.0
    used = used_groups(old)
    ratio = ((new.scale - old.scale).abs() / old.scale)[used]
    return ratio.max().item() if ratio.numel() else 0.0


def zero_points(weight: StoredWeight) -> Tensor:
    """Zero points of the scales' shape; zeros where there are none."""
    zeros = weight.zero_point
    return torch.zeros(weight.scale.shape, dtype=torch.int8) if zeros is None else zeros


def require_same(name: str, old: Tensor, new: Tensor) -> None:
    """Refuse tensors that differ in type, shape or any bit."""
    same = (old.dtype, old.shape) == (new.dtype, new.shape)
    if not same or not torch.equal(_bytes(old), _bytes(new)):
        raise CheckpointError(f"{name} was read back with other bits; check the disk")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
