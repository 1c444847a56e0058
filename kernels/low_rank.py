"""What a low-rank adapter adds to a linear layer, as kernels of a CPU read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

RANKS, RUN = 4, 16  # that lie together, as in csrc/api.h


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to some outputs of a layer; made by `of`.

    Attributes:
        a: A, fp32 or bf16 [r / 4, K / 16, 4, 16], filled up with zeros.
        b: B transposed, its factor multiplied in, likewise.
        first: The first of the outputs.
        inputs: K.
        outputs: n.
    """

    a: Tensor
    b: Tensor
    first: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, a: Tensor, b: Tensor, first: int, dtype: torch.dtype) -> Self:
        """Held in a type: a [r, K], b [n, r]."""
        return cls(_held(a, dtype), _held(b.T, dtype), first, a.shape[1], len(b))

    @property
    def rank(self) -> int:
        """r, with what fills it up."""
        return RANKS * len(self.a)

    def of_row(self, x: Tensor) -> Tensor:
        """B (A x) of a row fp32 [K], or longer: fp32 [n]."""
        a, b = (t.float().transpose(1, 2).flatten(2).flatten(0, 1) for t in (self.a, self.b))
        return (a[:, : self.inputs] @ x[: self.inputs]) @ b[:, : self.outputs]


def _held(rows: Tensor, dtype: torch.dtype) -> Tensor:
    ranks, size = rows.shape
    filled = F.pad(rows, (0, -size % RUN, 0, -ranks % RANKS)).to(dtype)
    return filled.unflatten(1, (-1, RUN)).unflatten(0, (-1, RANKS)).transpose(1, 2).contiguous()
