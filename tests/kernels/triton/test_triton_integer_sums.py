"""Sums of integer products as they are, without scales: parts of a sum over several GPUs."""

import pytest
import torch

from kernels.triton.common import Workspace
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.tuning import Tile
from tests.kernels.triton_lab import interpreted

OUTPUTS, INPUTS = 128, 512


def integers(*shape: int, top: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-top, top + 1, shape, generator=generator, dtype=torch.int8)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.long() @ weight.long().T).to(torch.int32)


@pytest.mark.parametrize("cut", [(64, 16, 1), (128, 16, 3)])
@interpreted
def test_w8a8(cut):
    workspace, bias = Workspace.on("cpu", 1 << 18, 64), torch.full((OUTPUTS,), 1e9)
    q, scale = integers(OUTPUTS, INPUTS, top=127), torch.rand(OUTPUTS)
    q[0] = -128
    weight = pack_w8a8(q, scale, bias)
    assert torch.equal(weight.output_scale, scale)
    for rows in (1, 17):
        x = integers(rows, INPUTS, top=127)
        got = weight.run(x, torch.rand(1), workspace, torch.int32, tile=Tile(*cut))
        assert got.dtype == torch.int32
        assert torch.equal(got, product(x, q))


@pytest.mark.parametrize("groups", [1, 4, 16])
@interpreted
def test_weights_of_two_levels(groups):
    """Of whole rows, of which 16 times the sum is formed, and with multipliers of groups."""
    workspace, unit = Workspace.on("cpu", 1 << 18, 64), torch.full((OUTPUTS, 1), 2.0**-10)
    q, multiples = integers(OUTPUTS, INPUTS, top=7), torch.ones(OUTPUTS, 1)
    if groups > 1:
        multiples = (integers(OUTPUTS, groups, top=7) + 9).float()
        multiples[:, :2] = torch.tensor([15.0, 16.0])
    weight = pack_w4a8(q, unit * multiples, torch.ones(OUTPUTS))
    assert torch.equal(weight.output_scale, unit[:, 0])
    x = integers(5, INPUTS, top=127)
    wide = multiples.repeat_interleave(INPUTS // groups, 1) * q
    got = weight.run(x, torch.rand(1), workspace, torch.int32)
    assert torch.equal(got, product(x, wide))


@interpreted
def test_other_weights_have_no_such_sums():
    q, ordinary = integers(OUTPUTS, INPUTS, top=7), 1 + torch.rand(OUTPUTS, 4)
    workspace, one = Workspace.on("cpu", 1 << 18, 64), torch.ones(1)
    weight = pack_w4a8(q, ordinary)
    assert not weight.exact
    with pytest.raises(ValueError, match="those of w4a8 are not"):
        weight.run(integers(5, INPUTS, top=7), one, workspace, torch.int32)
    with pytest.raises(ValueError, match="sums of w4a8 are not of integers alone"):
        weight.output_scale  # noqa: B018
    exact = pack_w8a8(q, ordinary[:, 0])
    with pytest.raises(ValueError, match=r"torch.int8 is asked for.* of w8a8 are"):
        exact.run(integers(5, INPUTS, top=7), one, workspace, torch.int8)
