"""Rounding with feedback: compiled as plain torch has it, and plain torch as the definition."""

import pytest
import torch

from kernels.cpu import native
from kernels.feedback import Grid, Rounding, move_all, round_all
from kernels.numerics import FP4, FP8, INT4, INT8, quantize

KINDS = {"int4": INT4, "int8": INT8, "fp8": FP8, "fp4": FP4}


def factor(size: int, seed: int) -> torch.Tensor:
    """A positive definite matrix of correlated channels, of mean diagonal 1: fp64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    found = mix @ mix.T / size
    return found / found.diagonal().mean() + 0.05 * torch.eye(size, dtype=torch.float64)


def upper(matrix: torch.Tensor) -> torch.Tensor:
    """U of the inverse."""
    return torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True).float()


def problem(rows: int, columns: int, kind, *, zeros: bool) -> tuple[torch.Tensor, Rounding]:
    """A weight [1, K, N] and what it is rounded to."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(1, columns, rows, generator=generator)
    scale = (weight.abs().amax(dim=1, keepdim=True) / kind.top).expand_as(weight).contiguous()
    points = torch.full_like(weight, 3.0) if zeros else None
    return weight, Rounding(Grid.of(kind), scale, points)


def obq(weight: torch.Tensor, to: Rounding, rows: torch.Tensor, columns: torch.Tensor):
    """Optimal Brain Quantization of all elements, its whole inverse updated after each: fp64."""
    inverse = torch.kron(torch.linalg.inv(columns), torch.linalg.inv(rows))
    w, q = weight.double().flatten().clone(), torch.zeros_like(weight).flatten()
    scale = to.scale.double().flatten()
    zeros = None if to.zeros is None else to.zeros.double().flatten()
    for i in range(len(w)):
        zero = None if zeros is None else zeros[i]
        q[i] = to.grid.nearest(w[i] / scale[i], zero)
        error = (w[i] - (q[i] - (0 if zero is None else zero)) * scale[i]) / inverse[i, i]
        w -= error * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return q.view_as(weight)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", [INT4, FP8, FP4], ids=lambda kind: kind.name)
def test_plain_torch_is_brain_surgery_on_both_sides(kind, zeros, monkeypatch):
    if zeros and kind is not INT4:
        pytest.skip("floats have no zero point")
    weight, to = problem(7, 11, kind, zeros=zeros)
    rows, columns = factor(7, 1), factor(11, 2)
    monkeypatch.setattr(native, "library", lambda: None)
    q = round_all(weight.clone(), to, upper(rows)[None], upper(columns))
    assert torch.equal(q, obq(weight, to, rows, columns))


@pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_compiled_code_finds_what_plain_torch_finds(isa, name, zeros, monkeypatch):
    kind = KINDS[name]
    if zeros and name.startswith("fp"):
        pytest.skip("floats have no zero point")
    weight, to = problem(21, 19, kind, zeros=zeros)
    rows, columns = factor(21, 1).float(), factor(19, 2).float()
    over, across = upper(rows.double())[None], upper(columns.double())
    found = round_all(weight.clone(), to, over, across)
    values = to.values(to.grid.nearest(weight / to.scale, to.zeros))
    gradient = columns @ (weight - values) @ rows
    ours = values.clone()
    moved = move_all(gradient.clone(), ours, to, rows[None], columns)
    assert torch.equal(ours, to.values(moved))
    monkeypatch.setattr(native, "library", lambda: None)
    assert (round_all(weight.clone(), to, over, across) == found).float().mean() > 0.99
    assert (move_all(gradient, values, to, rows[None], columns) == moved).float().mean() > 0.99


@pytest.mark.skipif(not native.supported(), reason="no C++ compiler")
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (65, 130), (3, 200), (200, 3)])
def test_no_move_raises_the_error_whatever_the_tiles(isa, rows, columns):
    weight, to = problem(rows, columns, INT4, zeros=False)
    left, right = factor(rows, 1), factor(columns, 2)

    def error(q: torch.Tensor) -> float:
        e = (weight - to.values(q)).double()
        return ((right @ e @ left) * e).sum().item()

    nearest = to.grid.nearest(weight / to.scale)
    q = round_all(weight.clone(), to, upper(left)[None], upper(right))
    seen = [error(q)]
    assert seen[0] < 0.8 * error(nearest)
    for _ in range(3):
        values = to.values(q)
        gradient = (right @ (weight - values).double() @ left).float()
        q = move_all(gradient, values, to, left.float()[None], right.float())
        seen.append(error(q))
    assert seen == sorted(seen, reverse=True)
    assert seen[1] < seen[0]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_grids_are_those_of_the_types(kind):
    x = torch.cat([torch.linspace(-kind.q_max * 1.2, kind.q_max * 1.2, 4001), torch.zeros(1)])
    x = torch.cat([x, x / 1000, torch.tensor([0.5, 1.5, 2.5, -0.5])])
    assert torch.equal(Grid.of(kind).nearest(x), quantize(x, torch.ones(()), kind).float())
