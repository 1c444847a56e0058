"""Row-wise ops against fp64, and rows that keep their bits wherever they lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.ops import apply_rope, gated_product, rms_norm


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [64, 288, 4544])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(size, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(40, size).to(dtype), torch.randn(size).to(dtype)
    got = rms_norm(x, weight, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    want = F.rms_norm(x.double(), (size,), weight.double(), 1e-5).to(dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-5)[0], got[i]) for i in range(40))


@pytest.mark.usefixtures("backend")
def test_silu_mul_is_the_same_wherever_an_element_lies():
    torch.manual_seed(0)
    gate, up = torch.randn(37, 301) * 20, torch.randn(37, 301)
    got = gated_product(gate, up)
    want = (F.silu(gate.double()) * up.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for count in (1, 2, 3, 7):
        assert torch.equal(
            gated_product(gate[5 : 5 + count], up[5 : 5 + count]), got[5 : 5 + count]
        )
    extreme = gated_product(torch.tensor([[-1e4, 1e4, 0.0]]), torch.ones(1, 3))
    assert extreme.tolist() == [[0.0, 1e4, 0.0]]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dim", [32, 40])
def test_rope(dim):
    torch.manual_seed(0)
    q, k = torch.randn(7, 4, dim), torch.randn(7, 2, dim)
    angle = torch.outer(torch.arange(7.0), 1e4 ** (-torch.arange(16) / 16)).repeat(1, 2)
    got = apply_rope(q, k, angle.cos(), angle.sin())
    turn = torch.polar(torch.ones(7, 1, 16).double(), angle[:, None, :16].double())
    for rotated, x in zip(got, (q, k), strict=True):  # the pair (x_i, x_{i + R/2}) turns
        want = turn * torch.complex(*x[..., :32].double().chunk(2, dim=-1))
        want = torch.cat((want.real.float(), want.imag.float(), x[..., 32:]), dim=-1)
        torch.testing.assert_close(rotated, want, rtol=1e-5, atol=1e-6)
