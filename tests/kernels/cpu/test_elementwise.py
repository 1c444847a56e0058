"""Row-wise ops against fp64, and rows that keep their bits wherever they lie."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.ops import apply_rope, gated_product, rms_norm, softcapped


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


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_are_the_same_wherever_an_element_lies(activation):
    torch.manual_seed(0)
    product = partial(gated_product, activation=activation)
    gate, up = torch.randn(37, 301) * 20, torch.randn(37, 301)
    got = product(gate, up)
    want = (ACTIVATIONS[activation](gate.double()) * up.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for count in (1, 2, 3, 7):
        part = slice(5, 5 + count)
        assert torch.equal(product(gate[part], up[part]), got[part])
    extreme = product(torch.tensor([[-1e4, 1e4, 0.0]]), torch.ones(1, 3))
    assert extreme.tolist() == [[0.0, 1e4, 0.0]]


@pytest.mark.usefixtures("backend")
def test_logits_are_bounded():
    x = torch.tensor([[-1e4, -3.0, 0.0, 1e-3, 3.0, 1e4]])
    want = (torch.tanh(x.double() / 5) * 5).float()
    torch.testing.assert_close(softcapped(x, 5.0), want, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dim", [32, 40])
def test_rope(dim):
    torch.manual_seed(0)
    half = dim // 2
    q, k = torch.randn(7, 4, dim), torch.randn(7, 2, dim)
    angle = torch.outer(torch.arange(7.0), 1e4 ** (-torch.arange(half) / half)).repeat(1, 2)
    got = apply_rope(q, k, angle.cos(), angle.sin())
    turn = torch.polar(torch.ones(7, 1, half).double(), angle[:, None, :half].double())
    for rotated, x in zip(got, (q, k), strict=True):  # the pair (x_i, x_{i + D/2}) turns
        want = turn * torch.complex(*x.double().chunk(2, dim=-1))
        want = torch.cat((want.real.float(), want.imag.float()), dim=-1)
        torch.testing.assert_close(rotated, want, rtol=1e-5, atol=1e-6)
