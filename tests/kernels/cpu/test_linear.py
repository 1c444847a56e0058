"""Linear ops: integers exactly, floats near fp64, rows bit for bit whatever shares the call."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.weights import pack_float_weight, pack_quantized_weight
from kernels.numerics import (
    FP8,
    INT4,
    TINY_SCALE,
    block_absmax,
    choose_affine,
    choose_scale,
    dequantize,
    quantize,
)
from kernels.ops import fake_quantize_fp8, linear, quantize_per_token, quantize_static
from tests.kernels.cpu.test_native_int import integers
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(1, 64, 64), (3, 288, 96), (5, 576, 33), (17, 1024, 128), (4, 1025, 7), (9, 4544, 61)]


def in_fp64(x, weight, bias=None) -> torch.Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


def pack_int8(q: torch.Tensor, scale: torch.Tensor, bias=None):
    return pack_quantized_weight(q, scale.reshape(-1, 1), "int8", bias=bias, integer_inputs=True)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_linear_is_exact(rows, inputs, outputs, per_token, with_bias):
    torch.manual_seed(rows)
    x, q = integers(-127, 127, rows, inputs, seed=1), integers(-127, 127, outputs, inputs, seed=2)
    x_scale = torch.rand(rows, 1) + 0.01 if per_token else torch.tensor(0.03)
    w_scale = torch.rand(outputs) + 0.01
    bias = torch.randn(outputs) if with_bias else None
    got = linear(x, pack_int8(q, w_scale, bias), x_scale)
    sums = (x.long() @ q.long().T).float()  # in int64, scaled in fp32
    wanted = sums * (x_scale.reshape(-1, 1) * w_scale.reshape(1, -1))
    assert torch.equal(got, wanted if bias is None else wanted + bias)


@pytest.mark.parametrize("most", [127, -127, -128])  # the last of others' checkpoints
def test_int8_linear_is_exact_where_every_product_is_the_largest(most):
    inputs = 11008
    x = torch.full((2, inputs), 127, dtype=torch.int8)
    x[1] = -127
    q = torch.full((3, inputs), most, dtype=torch.int8)
    q[1, ::2] = 126
    got = linear(x, pack_int8(q, torch.ones(3)), torch.tensor(1.0))
    want = (x.long() @ q.long().T).float()
    assert torch.equal(got, want)
    assert want[0, 0] == 127 * most * inputs


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (288, 96), (768, 256), (2100, 77)])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_a_row_has_the_same_bits_in_any_batch(inputs, outputs, threads, with_threads):
    with_threads(threads)
    x, w, bias = torch.randn(130, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    weight = pack_float_weight(w, bias)
    whole = linear(x, weight)
    assert len(whole) == 130
    for count in (*range(1, 18), 24, 31, 32, 33, 39, 64, 99, 100):
        part = linear(x[10 : 10 + count], weight)
        assert torch.equal(part, whole[10 : 10 + count]), count
    assert torch.allclose(whole, in_fp64(x, w, bias), atol=1e-3)


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("integer_inputs", [True, False])
def test_int4_weights_stand_for_their_values(group, symmetric, integer_inputs):
    w, x, block = torch.randn(40, 288), torch.randn(7, 288), (1, group or -1)
    if symmetric:
        scale, zero = choose_scale(block_absmax(w, block), INT4), None
    else:
        groups = w.split(group or 288, dim=1)
        low = torch.stack([part.amin(1) for part in groups], dim=1)
        high = torch.stack([part.amax(1) for part in groups], dim=1)
        scale, zero = choose_affine(low, high, INT4)
    q = quantize(w, scale, INT4, zero, block)
    weight = pack_quantized_weight(
        q, scale, "int4", zero, group, torch.ones(40), integer_inputs=integer_inputs
    )
    xq, x_scale = quantize_per_token(x)
    seen = dequantize(xq, x_scale) if integer_inputs else x
    got = linear(xq, weight, x_scale) if integer_inputs else linear(x, weight)
    values = dequantize(q, scale, zero, block)
    want = in_fp64(seen, values, torch.ones(40))
    rounded = not integer_inputs and group is not None  # to int16, up to 1.3e-4 from these x
    atol, rtol = (5e-3, 0) if rounded else (2e-5, 2e-5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("group", [None, 128])
def test_fp8_weights_and_inputs_stand_for_their_values(group):
    w, x, block = torch.randn(40, 300), torch.randn(5, 300) * 3, (1, group or -1)
    scale = choose_scale(block_absmax(w, block), FP8)
    q = quantize(w, scale, FP8, block=block)
    weight = pack_quantized_weight(q, scale, "fp8_e4m3", group=group)
    seen = fake_quantize_fp8(x, None, group or -1)
    x_scale = choose_scale(block_absmax(x, block), FP8)
    rounded = dequantize(quantize(x, x_scale, FP8, block=block), x_scale, block=block)
    assert torch.equal(seen, rounded)
    static = fake_quantize_fp8(x, torch.tensor(0.01))
    assert torch.equal(static, dequantize(quantize(x, torch.tensor(0.01), FP8), torch.tensor(0.01)))
    want = in_fp64(seen, dequantize(q, scale, block=block))
    torch.testing.assert_close(linear(seen, weight), want, atol=2e-5, rtol=2e-5)


def test_quantize_rounds_half_to_even_and_clamps_to_127():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0, 0.49999997]])
    got = quantize_static(x, torch.tensor(1.0))
    assert got.tolist() == [[0, 2, 2, 0, -2, 127, -127, 0]]


def test_quantize_per_token_scales_each_row_by_its_absmax_and_survives_rows_of_zeros():
    x = torch.randn(9, 77) * torch.logspace(-5, 5, 9)[:, None]
    x[4] = 0
    q, scale = quantize_per_token(x)
    for row, own, step in zip(x, q, scale, strict=True):
        assert step == (row.abs().max() / 127).clamp(min=TINY_SCALE)
        assert torch.equal(own, (row / step).round().clamp(-127, 127).to(torch.int8))
    assert (scale > 0).all()
    assert (q[4] == 0).all()
    assert quantize_per_token(x[:0])[1].shape == (0, 1)


def test_quantize_per_token_refuses_nan():
    refused("NaN", quantize_per_token, torch.tensor([[1.0, float("nan")]]))


def test_packing_refuses_what_the_kernel_does_not_hold():
    q = integers(-127, 127, 4, 8)
    refused("int8", pack_int8, q.float(), torch.ones(4))
    refused(r"\(5, 1\); needed is \(4, 1\)", pack_int8, q, torch.ones(5))
    with pytest.raises(ValueError, match="zero points"):
        pack_quantized_weight(q, torch.ones(4, 1), "int8", torch.zeros(4, 2, dtype=torch.int8))
    refused("127", pack_quantized_weight, q, torch.ones(4, 1), "int4")
