"""Compiled row-wise ops: quantization bit for bit, the others near fp64, rows that stay."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kernels.ops as ops
import kernels.reference as reference
from kernels.cpu import native_ops
from kernels.numerics import FP8, fake_quantize_activations
from tests.refusals import refused

COLUMNS = (1, 3, 7, 33, 61, 96, 288, 1025, 4544)


def values(rows: int, columns: int) -> torch.Tensor:
    """Rows of different sizes: of zeros, of next to nothing, and with ties in them."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    x[rows // 2] = 0
    x[rows // 3] *= 2.0**-80
    x[-1] = torch.randint(-127, 128, (columns,), generator=generator) / 2.0
    x[-1, 0] = 127.0  # scale 1: halves are ties
    return x


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("columns", COLUMNS)
def test_quantize_equals_torch_bit_for_bit(isa, columns, threads, with_threads):
    with_threads(threads)
    for rows in (1, 2, 30):
        x = values(rows, columns)
        for part in (x, x.bfloat16(), torch.cat((x, x), dim=1)[:, :columns]):
            q, scale = native_ops.quantize_per_token(part)
            want_q, want_scale = reference.quantize_per_token(part)
            assert torch.equal(q, want_q)
            assert torch.equal(scale, want_scale)
        static = torch.tensor(0.037)
        got = native_ops.quantize_static(x, static)
        assert torch.equal(got, reference.quantize_static(x, static))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("group", [-1, 32, 128])
def test_fp8_equals_torch_bit_for_bit(isa, columns, group):
    x = values(30, columns)
    got = native_ops.fake_quantize_fp8(x, None, group)
    padded = min(group, columns)
    assert torch.equal(got, fake_quantize_activations(x, None, FP8, padded))
    static = torch.tensor([0.0123])
    got = native_ops.fake_quantize_fp8(x, static)
    assert torch.equal(got, fake_quantize_activations(x, static, FP8))


def test_fp8_rounds_half_to_even_everywhere(isa):
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    one_off = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (0.0, 1e9)]
    x = torch.cat((codes, middle, *one_off, torch.tensor([460.0, 464.0, 1e30, torch.inf])))
    x = torch.cat((x, -x, torch.tensor([torch.nan]))).reshape(1, -1)
    got = native_ops.fake_quantize_fp8(x, torch.tensor(1.0))
    want = fake_quantize_activations(x, torch.tensor(1.0), FP8)
    assert torch.equal(got.view(torch.int32)[:, :-1], want.view(torch.int32)[:, :-1])  # -0 too
    assert bool(got[0, -1].isnan())


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 40, 99, 100])
def test_dynamic_scales_need_finite_data(isa, bad, place):
    x = torch.randn(3, 101)
    x[1, place] = bad
    refused("must be finite", native_ops.quantize_per_token, x)
    refused("must be finite", native_ops.fake_quantize_fp8, x, None, 32)
    static = native_ops.quantize_static(x, torch.tensor(0.1))
    assert static[1, place] == (0 if bad != bad else 127 if bad > 0 else -127)


def test_no_rows_are_no_rows(isa):
    q, scale = native_ops.quantize_per_token(torch.empty(0, 5))
    assert (q.shape, scale.shape) == ((0, 5), (0, 1))
    assert native_ops.rms_norm(torch.empty(0, 5), torch.ones(5), 1e-5).shape == (0, 5)
    assert native_ops.gated_product(torch.empty(0, 5), torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("size", [1, 7, 61, 64, 288, 4544])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(every_backend, size, dtype, with_threads):
    x, weight = torch.randn(4, 10, size).to(dtype), torch.randn(size).to(dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    want = F.rms_norm(x.double(), (size,), weight.double(), 1e-5).to(dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    with_threads(3)
    rows, norms = x.reshape(-1, size), got.reshape(-1, size)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), got)
    for i in range(40):
        assert torch.equal(ops.rms_norm(rows[i : i + 1], weight, 1e-5)[0], norms[i])


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_are_the_same_wherever_an_element_lies(
    every_backend, with_threads, activation
):
    product = partial(ops.gated_product, activation=activation)
    both = torch.randn(37, 2602)
    both[:, :1301] *= 20
    gate, up = both[:, :1301], both[:, 1301:]
    got = product(gate, up)
    want = (ACTIVATIONS[activation](gate.double()) * up.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    with_threads(4)
    for count in (1, 2, 3, 7):
        part = slice(5, 5 + count)
        assert torch.equal(product(gate[part], up[part].contiguous()), got[part])
    for begin in (1, 2, 1000):
        assert torch.equal(product(gate[:, begin:], up[:, begin:]), got[:, begin:])
    extreme = product(torch.tensor([[-1e4, 1e4, 0.0, torch.nan]]), torch.ones(1, 4))
    assert extreme[0, :3].tolist() == [0.0, 1e4, 0.0]
    assert bool(extreme[0, 3].isnan())


@pytest.mark.parametrize("bound", [0.7, 30.0])
def test_softcap(every_backend, bound, with_threads):
    x = torch.cat((torch.randn(3, 411) * 60, torch.randn(3, 411) * 1e-3), dim=1)
    x[0, :6] = torch.tensor([-1e4, -3.0, 0.0, 1e-3, 3.0, 1e4])
    got = ops.softcapped(x, bound)
    want = (torch.tanh(x.double() / bound) * bound).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7 * bound)
    with_threads(3)
    assert torch.equal(ops.softcapped(x, bound), got)
    assert torch.equal(ops.softcapped(x[1:, 5:], bound), got[1:, 5:])
    most = torch.tensor([bound, -bound])
    assert torch.equal(ops.softcapped(torch.tensor([1e9, -1e9]), bound), most)


@pytest.mark.parametrize("dim", [2, 14, 32, 80])
def test_rope_equals_torch_bit_for_bit(isa, dim, with_threads):
    with_threads(3)
    qkv = torch.randn(7, 8, dim)
    q, k, cos, sin = qkv[:, :4], qkv[:, 4:6], torch.randn(7, dim), torch.randn(7, dim)
    got = native_ops.apply_rope(q, k, cos, sin)
    torch.testing.assert_close(got, reference.apply_rope(q, k, cos, sin), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [32, 40])
def test_rope_turns_pairs(every_backend, dim):
    half = dim // 2
    q, k = torch.randn(7, 4, dim), torch.randn(7, 2, dim)
    angle = torch.outer(torch.arange(7.0), 1e4 ** (-torch.arange(half) / half)).repeat(1, 2)
    got = ops.apply_rope(q, k, angle.cos(), angle.sin())
    turn = torch.polar(torch.ones(7, 1, half).double(), angle[:, None, :half].double())
    for rotated, x in zip(got, (q, k), strict=True):  # the pair (x_i, x_{i + D/2}) turns
        want = turn * torch.complex(*x.double().chunk(2, dim=-1))
        want = torch.cat((want.real.float(), want.imag.float()), dim=-1)
        torch.testing.assert_close(rotated, want, rtol=1e-5, atol=1e-6)


def test_shapes_that_do_not_fit_are_told(isa):
    x = torch.randn(3, 8)
    refused("weight is", native_ops.rms_norm, x, torch.ones(7), 1e-5)
    refused("they must agree", native_ops.gated_product, x, x[:, :7])
    refused("cos is", native_ops.apply_rope, x[:, None], x[:, None], x[:2], x)
    refused("one element", native_ops.quantize_static, x, torch.ones(2))
    refused("needed is a positive number", native_ops.fake_quantize_fp8, x, None, 0)
