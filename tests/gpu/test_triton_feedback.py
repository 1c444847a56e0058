"""Rounding with feedback on a GPU, against the CPU."""

from __future__ import annotations

import pytest
import torch

import kernels.feedback as feedback
from kernels.feedback import Grid, Rounding
from kernels.numerics import TYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(
    ("kind", "blocks", "rows", "columns"),
    [("int4", 3, 256, 192), ("int4", 1, 7, 500), ("int8", 1, 65, 64), ("fp8_e4m3", 1, 33, 130)],
)
def test_a_gpu_finds_what_the_cpu_finds(kind, blocks, rows, columns):
    import kernels.triton.calibration.feedback as gpu

    torch.manual_seed(0)
    weight = torch.randn(blocks, columns, rows)
    scale = (weight.abs().amax(dim=1, keepdim=True) / TYPES[kind].top).expand_as(weight)
    to = Rounding(Grid.of(TYPES[kind]), scale.contiguous())
    there = Rounding(to.grid, to.scale.cuda())
    left, right = torch.randn(blocks, rows, 2 * rows), torch.randn(columns, 2 * columns)
    left, right = left @ left.mT / rows, right @ right.T / columns
    over, across = (
        torch.linalg.cholesky(torch.linalg.inv(x.double()), upper=True).float()
        for x in (left, right)
    )

    def cost(q: torch.Tensor) -> float:
        error = (weight - to.values(q)).double()
        return ((right.double() @ error @ left.double()) * error).sum().item()

    wanted = feedback.round_all(weight.clone(), to, over, across)
    found = [
        gpu.round_all(weight.cuda(), there, over.cuda(), across.cuda()).cpu() for _ in range(2)
    ]
    assert torch.equal(*found)
    assert (found[0] == wanted).float().mean() > 0.95  # sums of another order
    assert abs(cost(found[0]) / cost(wanted) - 1) < 0.01
    values = to.values(wanted)
    gradient = right @ (weight - values) @ left
    moved = gpu.move_all(gradient.cuda(), values.cuda(), there, left.cuda(), right.cuda()).cpu()
    assert cost(moved) < cost(wanted)
