"""Linear ops against their twins: integers exactly, rows bit for bit whatever shares the call."""

from __future__ import annotations

import pytest
import torch

import kernels.reference as reference
from kernels.ops import (
    float_linear,
    int8_linear,
    pack_float_weight,
    pack_int8_weight,
    quantize_per_token,
    quantize_static,
)

SHAPES = [(1, 64, 64), (3, 288, 96), (5, 576, 33), (17, 1024, 128), (4, 1025, 7), (9, 4544, 61)]


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_linear_equals_its_twin_bit_for_bit(rows, inputs, outputs, per_token, with_bias):
    torch.manual_seed(rows)
    x, q = integers(rows, inputs, seed=1), integers(outputs, inputs, seed=2)
    x_scale = torch.rand(rows, 1) + 0.01 if per_token else torch.tensor(0.03)
    w_scale = torch.rand(outputs) + 0.01
    bias = torch.randn(outputs) if with_bias else None
    got = int8_linear(x, x_scale, pack_int8_weight(q, w_scale[:, None], bias))
    assert torch.equal(got, reference.int8_linear(x, x_scale, q, w_scale, bias))


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_linear_is_exact_where_every_product_is_the_largest(sign):
    inputs = 11008
    x = torch.full((2, inputs), 127, dtype=torch.int8)
    q = torch.full((3, inputs), 127 * sign, dtype=torch.int8)
    q[1, ::2] = 126
    got = int8_linear(x, torch.tensor(1.0), pack_int8_weight(q, torch.ones(3)))
    want = (x.long() @ q.long().T).float()
    assert torch.equal(got, want)
    assert abs(want[0, 0].item()) == 127 * 127 * inputs


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (288, 96), (768, 256), (2100, 77)])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_a_row_has_the_same_bits_in_any_batch(inputs, outputs, threads, with_threads):
    with_threads(threads)
    torch.manual_seed(0)
    x, w = torch.randn(130, inputs), torch.randn(outputs, inputs)
    weight = pack_float_weight(w, torch.randn(outputs))
    whole = float_linear(x, weight)
    assert len(whole) == 130
    for count in (*range(1, 40), 64, 99, 100):
        part = float_linear(x[10 : 10 + count], weight)
        assert torch.equal(part, whole[10 : 10 + count]), count
    assert torch.allclose(whole, reference.float_linear(x, w, weight.bias), atol=1e-3)


def test_quantize_rounds_half_to_even_and_clamps_to_127():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0, 0.49999997]])
    got = quantize_static(x, torch.tensor(1.0))
    assert got.tolist() == [[0, 2, 2, 0, -2, 127, -127, 0]]


def test_quantize_per_token_equals_its_twin_and_survives_rows_of_zeros():
    torch.manual_seed(0)
    x = torch.randn(9, 77) * torch.logspace(-5, 5, 9)[:, None]
    x[4] = 0
    q, scale = quantize_per_token(x)
    want_q, want_scale = reference.quantize_per_token(x)
    assert torch.equal(q, want_q)
    assert torch.equal(scale, want_scale)
    assert (scale > 0).all()
    assert (q[4] == 0).all()
    assert quantize_per_token(x[:0])[1].shape == (0, 1)


def test_quantize_per_token_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        quantize_per_token(torch.tensor([[1.0, float("nan")]]))


def test_packing_refuses_what_the_kernel_does_not_hold():
    q = integers(4, 8)
    with pytest.raises(ValueError, match="int8"):
        pack_int8_weight(q.float(), torch.ones(4))
    with pytest.raises(ValueError, match="5 scales for 4"):
        pack_int8_weight(q, torch.ones(5))
    q[0, 0] = -128
    with pytest.raises(ValueError, match="-128"):
        pack_int8_weight(q, torch.ones(4))
