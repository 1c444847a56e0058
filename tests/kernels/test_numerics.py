"""Scales and rounding."""

import numpy as np
import pytest
import torch

from kernels.numerics import (
    FP8,
    INT4,
    INT8,
    TINY_SCALE,
    block_absmax,
    block_view,
    choose_affine,
    choose_scale,
    dequantize,
    fake_quantize,
    fake_quantize_activations,
    outer_scales,
    quantize,
    sqnr_db,
)
from tests.refusals import refused


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 16), (8, 8), (-1, 1)])
def test_every_granularity_loses_at_most_half_a_step(block):
    x = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    scale = choose_scale(block_absmax(x, block))
    q = quantize(x, scale)
    rows, columns = (size if b == -1 else b for b, size in zip(block, x.shape, strict=True))
    steps = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert ((dequantize(q, scale) - x).abs() <= steps * 0.5001).all()
    assert q.abs().max() == 127
    assert torch.equal(quantize(-x, scale), -q)


def test_a_block_of_zeros_has_a_positive_scale():
    scale = choose_scale(block_absmax(torch.zeros(2, 4), (1, -1)))
    assert (scale == TINY_SCALE).all()
    assert (quantize(torch.zeros(2, 4), scale) == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_range_that_is_none_is_refused(bad):
    refused("finite", choose_scale, torch.tensor([1.0, bad]))


def test_nan_survives_the_absmax():
    assert block_absmax(torch.tensor([[1.0, float("nan")]]), (-1, -1)).isnan().all()


def test_scales_of_rows_and_columns_cut_nothing_and_round_finer_than_rows():
    x = torch.randn(2, 3, 40, 24)
    x *= torch.rand(2, 3, 40, 1) * torch.rand(2, 3, 1, 24) ** 3
    rows, columns = outer_scales(x)
    assert (rows.shape, columns.shape) == ((2, 3, 40, 1), (2, 3, 1, 24))
    y = x.double().numpy()
    high = np.sqrt(np.abs(y).max(-1, keepdims=True))
    wide = np.abs(y / high).max(-2, keepdims=True) / 127
    exact = torch.from_numpy(high * wide)
    torch.testing.assert_close((rows * columns).double(), exact, rtol=1e-6, atol=0)
    assert (x / (rows * columns)).abs().max() < 127.001
    fine = dequantize(quantize(x, rows * columns), rows * columns)
    assert ((fine - x).abs() <= rows * columns / 1.999).all()
    coarse = fake_quantize(x, choose_scale(block_absmax(x, (1, 1, 1, -1))))
    assert (fine - x).norm() < 0.8 * (coarse - x).norm()


def test_scales_of_rows_and_columns_of_zeros_are_positive_and_nan_stays():
    x = torch.zeros(2, 4, 4)
    x[1, 2, 3] = torch.nan
    rows, columns = outer_scales(x)
    scale = rows * columns
    assert (scale[0] > 0).all()
    assert torch.equal(dequantize(quantize(x[0], scale[0]), scale[0]), x[0])
    assert scale[1].isnan().any()


def test_a_view_in_blocks_needs_whole_ones():
    refused("does not divide", block_view, torch.zeros(4, 6), (1, 4))
    refused("dimensions", block_view, torch.zeros(4, 6), (4,))


@pytest.mark.parametrize("kind", [INT8, INT4, FP8], ids=lambda kind: kind.name)
def test_blocks_at_an_edge_are_smaller(kind):
    x, block = torch.randn(300, 200), (128, 128)
    absmax = block_absmax(x, block)
    assert absmax.shape == (3, 2)
    assert absmax[2, 1] == x[256:, 128:].abs().max()
    scale = choose_scale(absmax, kind)
    back = dequantize(quantize(x, scale, kind, block=block), scale, block=block)
    for rows, columns in ((slice(0, 128), slice(0, 128)), (slice(256, 300), slice(128, 200))):
        own = scale[rows.start // 128, columns.start // 128]
        part = x[rows, columns]
        assert torch.equal(back[rows, columns], dequantize(quantize(part, own, kind), own))
    assert (back - x).abs().max() < x.abs().max() / 14


def test_asymmetric_integers_keep_zero_and_both_ends():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-3.0, 0.0, 1.0, 4.5], [-4.0, -3.0, -1.0, 0.0]])
    scale, zero_point = choose_affine(x.amin(1, keepdim=True), x.amax(1, keepdim=True), INT4)
    q = quantize(x, scale, INT4, zero_point)
    assert q.dtype == zero_point.dtype == torch.int8
    assert zero_point.flatten().tolist() == [-8, -2, 7]
    assert (q.amin(1).tolist(), q.amax(1).tolist()) == ([-8, -8, -8], [7, 7, 7])
    back = dequantize(q, scale, zero_point)
    assert (back[x == 0] == 0).all()
    assert ((back - x).abs() <= scale / 2 * 1.0001).all()


def test_fp8_is_clamped_and_rounds_to_even():
    x = torch.tensor([500.0, -1e9, 17.0, 19.0, 2.0**-10, 0.0])  # at 16 the step is 2
    q = quantize(x, torch.tensor(1.0), FP8)
    assert q.dtype == torch.float8_e4m3fn
    assert q.float().tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 0.0]


def test_dynamic_input_scales_each_row_or_group_alone():
    x = torch.tensor([[1.0, 0.4, -0.2, 8.0], [100.0, 40.0, -20.0, 800.0]])[None]
    seen = fake_quantize_activations(x, None)
    assert seen.shape == x.shape
    assert torch.allclose(seen[0, 1], seen[0, 0] * 100)
    assert torch.equal(fake_quantize_activations(x[:, :1], None), seen[:, :1])
    grouped = fake_quantize_activations(x, None, FP8, 2)
    assert torch.equal(grouped[..., :2], fake_quantize_activations(x[..., :2], None, FP8))
    static = fake_quantize_activations(x, torch.tensor([0.1]))
    assert static.abs().max() == 127 * torch.tensor(0.1)


def test_signal_to_noise():
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert sqnr_db(x, x) == float("inf")
    assert sqnr_db(x, x * 0) == pytest.approx(0.0)
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(x, fake_quantize(x, torch.tensor(1 / 127))) > 120
