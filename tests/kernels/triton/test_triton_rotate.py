"""Rotation alone in Triton's interpreter, against plain torch."""

import pytest
import torch

from kernels.reference import apply_rope
from kernels.triton.attention.rotate import rotate
from tests.kernels.triton_lab import interpreted


@pytest.mark.parametrize("dim", [16, 24])
@interpreted
def test_heads_are_turned_by_halves(dim):
    torch.manual_seed(0)
    q, k, _ = torch.randn(5, 8, dim).split([4, 2, 2], dim=1)  # rows are parts of longer ones
    angle = torch.randn(5, dim // 2).repeat(1, 2)
    found, wanted = (f(q, k, angle.cos(), angle.sin()) for f in (rotate, apply_rope))
    for x, y in zip(found, wanted, strict=True):
        assert x.is_contiguous()
        assert torch.allclose(x, y, atol=1e-5)
    some = torch.randn(5, 5).repeat(1, 2)
    for own, whole, x in zip(
        rotate(q, k, some.cos(), some.sin()),
        apply_rope(q[..., :10], k[..., :10], some.cos(), some.sin()),
        (q, k),
        strict=True,
    ):
        assert torch.allclose(own[..., :10], whole, atol=1e-5)
        assert torch.equal(own[..., 10:], x[..., 10:])
    with pytest.raises(ValueError, match="cos is"):
        rotate(q, k, angle[:4].cos(), angle[:4].sin())
