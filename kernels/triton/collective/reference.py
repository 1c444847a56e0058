"""Plain torch twins of the all-reduces: they add the parts of all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.triton.collective.all_reduce import Scaling


def sum_of_parts(
    parts: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling | None = None
) -> Tensor:
    """fp32 [rows, hidden]: parts added in their order, or exactly and then rounded to `dtype`."""
    total = torch.zeros_like(parts[0], dtype=torch.float32 if scaling is None else torch.int32)
    for part in parts:
        total = total + part.to(total.dtype)
    return total if scaling is None else scaling.of(total, dtype).float()


def add_rms_norm(
    parts: Sequence[Tensor],
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    after: Tensor | None = None,
    scaling: Scaling | None = None,
    result: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`kernels.triton.reference.add_rms_norm` of the sum of parts; `result` is the sum's type."""
    total = sum_of_parts(parts, result, scaling)
    if residual is not None:
        before = residual.float()
        total = twins.add_rms_norm(total, before, None, eps, None, torch.float32, after=after)[2]
    total = total.to(result)
    rows, scales, _ = twins.add_rms_norm(total, None, weight, eps, scale, dtype, group)
    return rows, scales, total
