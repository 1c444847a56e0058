"""Rounding with feedback on a GPU: what plain code finds, in Triton's interpreter; and compiled."""

import pytest
import torch

import kernels.feedback as feedback
import kernels.triton.calibration.feedback as gpu
from kernels.feedback import Grid, Rounding
from kernels.numerics import TYPES
from tests.kernels.triton_lab import building_for, compiled, interpreted


def problem(rows: int, columns: int, kind: str, *, zeros: bool):
    """Two blocks of a weight, what they are rounded to, and factors of rows and of columns."""
    torch.manual_seed(rows * columns)
    weight = torch.randn(2, columns, rows)
    scale = (weight.abs().amax(dim=1, keepdim=True) / TYPES[kind].top).expand_as(weight)
    points = torch.full_like(weight, 3.0) if zeros else None
    to = Rounding(Grid.of(TYPES[kind]), scale.contiguous(), points)
    mix, other = torch.randn(2, rows, 2 * rows), torch.randn(columns, 2 * columns)
    return weight, to, mix @ mix.mT / rows, other @ other.T / columns


def uppers(matrix: torch.Tensor) -> torch.Tensor:
    """U of the inverse."""
    return torch.linalg.cholesky(torch.linalg.inv(matrix.double()), upper=True).float()


@pytest.mark.parametrize(("kind", "zeros"), [("int4", True), ("fp8_e4m3", False)])
@interpreted
def test_tiles_of_an_anti_diagonal_find_what_plain_code_finds(kind, zeros):
    gpu.SIZE = feedback.SIZE = 16  # tiles of which the interpreter takes fewer steps
    weight, to, rows, columns = problem(17, 19, kind, zeros=zeros)
    over, across = uppers(rows), uppers(columns)
    wanted = feedback.round_all(weight.clone(), to, over, across)
    found = gpu.round_all(weight.clone(), to, over, across)
    assert (found == wanted).float().mean() > 0.99  # sums of another order
    values = to.values(wanted)
    gradient, ours = columns @ (weight - values) @ rows, values.clone()
    moved = feedback.move_all(gradient.clone(), values, to, rows, columns)
    assert (moved != wanted).any()
    assert (gpu.move_all(gradient, ours, to, rows, columns) == moved).float().mean() > 0.99
    assert (ours == values).float().mean() > 0.99


@compiled
def test_they_compile_for_gpus_without_spilling():
    weight, to, rows, columns = problem(32, 32, "fp8_e4m3", zeros=False)
    with building_for(90) as built:
        gpu.round_all(weight.clone(), to, rows, columns)
        gpu.move_all(weight.clone(), weight.clone(), to, rows, columns)
    assert built
    assert not any(binary.spills() for binary in built)
