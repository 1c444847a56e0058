"""Rotations of channels, and in which basis a model's residual stream is.

A Hadamard matrix H has entries +1 and -1 and orthogonal rows: H H^T = n I. Rotating by H / sqrt(n)
makes of one large channel n equal ones, and a random sign for each channel before it keeps it from
making a large channel of many equal ones (Tseng et al., "QuIP#", arXiv 2402.04396, section 3).

    Sylvester       H_2n = [[H_n, H_n], [H_n, -H_n]]
    Paley I         I + S of order q + 1, q = 3 mod 4
    Paley II        of order 2 (q + 1), q = 1 mod 4

with q prime and S made of the quadratic residues modulo q (Paley, "On Orthogonal Matrices", 1933).
Sizes 2^k m with such an m cover those of most models; any other gets a random orthogonal matrix,
the Q of a Gaussian matrix's QR decomposition.

A rotated model computes x R where the model that it was made of computes x (the method rotation).
Its logits are the same, but what reads x itself, such as a head that drafts and was trained for the
unrotated model, has to turn it back. config.json tells the seeds of the rotations, in their order:

    "residual_rotation": [0]

where R is the product of `random_rotation` of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.namespace import later

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

KEY = "residual_rotation"


def random_rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix [size, size] fp64, the same for the same seed.

    diag(signs) H / sqrt(size) where a Hadamard matrix H of the size is known here.
    """
    generator = torch.Generator().manual_seed(seed)
    hadamard = hadamard_matrix(size)
    if hadamard is None:
        gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        return q * r.diagonal().sign()  # the decomposition that is unique
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    return signs * hadamard / math.sqrt(size)


def hadamard_matrix(size: int) -> Tensor | None:
    """A Hadamard matrix [size, size] fp64 of +1 and -1; None where none is known here."""
    order, doublings = size, 0
    while order % 2 == 0 and order > 2:
        order, doublings = order // 2, doublings + 1
    while (matrix := _base(order)) is None and doublings:
        order, doublings = order * 2, doublings - 1
    if matrix is None:
        return None
    for _ in range(doublings):
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix


def _base(order: int) -> Tensor | None:
    """A matrix that is not made of a smaller one."""
    if order <= 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)[:order, :order]
    if order % 4:
        return None
    if _is_prime(order - 1):  # 3 mod 4
        return _conference(order - 1) + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
        rest = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
        eye = torch.eye(q + 1, dtype=torch.float64)
        return torch.kron(_conference(q), pair) + torch.kron(eye, rest)
    return None


def _conference(q: int) -> Tensor:
    """C of order q + 1 with C C^T = q I and a zero diagonal: Paley's, for a prime q.

    Inside its border, C_ij is 1 if i - j is a square modulo q, else -1. It is symmetric for q = 1
    mod 4 and antisymmetric for q = 3 mod 4.
    """
    residue = torch.full((q,), -1.0, dtype=torch.float64)
    residue[[i * i % q for i in range(1, q)]] = 1.0
    residue[0] = 0.0
    index = torch.arange(q)
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = 1.0 if q % 4 == 1 else -1.0
    matrix[1:, 1:] = residue[(index[:, None] - index) % q]
    return matrix


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))


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
    back = [random_rotation(size, seed).T for seed in reversed(seeds)]
    return reduce(torch.matmul, back + [random_rotation(size, seed) for seed in wanted])
