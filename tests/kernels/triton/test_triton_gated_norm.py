"""Norms with gates in Triton's interpreter, against plain torch."""

import pytest
import torch

import kernels.reference
from kernels.activations import Gate
from kernels.triton.gated_norm import gated_norm
from tests.kernels.triton_lab import interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 1536])
@interpreted
def test_gated_norms_are_their_twins(size, dtype):
    torch.manual_seed(0)
    both, weight = torch.randn(5, 2 * size).to(dtype), torch.rand(size)
    x, gate = both.chunk(2, dim=1)  # rows are parts of longer ones
    for form in (Gate(), Gate(silu=False), Gate(first=True), Gate(first=True, groups=4)):
        found = gated_norm(x, gate, weight, 1e-5, form)
        wanted = kernels.reference.gated_norm(x, gate, weight, 1e-5, form)
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted)
        assert torch.equal(gated_norm(x[None], gate[None], weight, 1e-5, form), found[None])
    with pytest.raises(ValueError, match="H a multiple of 5"):
        gated_norm(x, gate, weight, 1e-5, Gate(groups=5))
