"""In which basis a model's residual stream is: what config.json says of rotations folded into it.

A rotated model computes x R where the model that it was made of computes x (the method rotation).
Its logits are the same, but what reads x itself, such as a head that drafts and was trained for the
unrotated model, has to turn it back. config.json tells the seeds of the rotations, in their order:

    "residual_rotation": [0]

where R is the product of `formats.hadamard.random_rotation` of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.namespace import later

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

    from formats import hadamard

KEY = "residual_rotation"


def rotation_seeds(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Seeds of the rotations of a model, in their order; none where it was not rotated.

    Raises:
        CheckpointError: config.json says something else than such a list.
    """
    found = config.get(KEY, [])
    if not isinstance(found, list) or not all(type(seed) is int and seed >= 0 for seed in found):
        raise CheckpointError(
            f"config.json: {KEY} is {found!r}; it is a list of integers from 0, the seeds of the "
            "rotations of the residual stream. Restore what the quantizer wrote"
        )
    return tuple(found)


def with_rotation(config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The config.json of a model that is rotated once more."""
    return {**config, KEY: [*rotation_seeds(config), seed]}


def change_of_basis(
    source: Mapping[str, Any], target: Mapping[str, Any], size: int
) -> Tensor | None:
    """What turns the residual stream of one model into that of another of the same origin.

    Args:
        source: config.json of the one.
        target: Of the other.
        size: Width of the residual stream.

    Returns:
        fp64 [size, size], by which rows of channels are multiplied; None where both are the same.

    Raises:
        CheckpointError: one of them is damaged.
    """
    seeds, wanted = rotation_seeds(source), rotation_seeds(target)
    if seeds == wanted:
        return None
    back = [hadamard.random_rotation(size, seed).T for seed in reversed(seeds)]
    return reduce(torch.matmul, back + [hadamard.random_rotation(size, seed) for seed in wanted])
