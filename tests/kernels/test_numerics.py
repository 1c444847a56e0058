"""Scales and rounding."""

from __future__ import annotations

import pytest
import torch

from kernels.numerics import (
    TINY_SCALE,
    block_absmax,
    choose_scale,
    dequantize,
    fake_quantize,
    quantize,
    sqnr_db,
)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 16), (8, 8), (-1, 1)])
def test_every_granularity_loses_at_most_half_a_step(block):
    torch.manual_seed(0)
    x = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    scale = choose_scale(block_absmax(x, block))
    q = quantize(x, scale)
    rows, columns = (
        (16 if b == -1 else b for b in block[:1]),
        (64 if b == -1 else b for b in block[1:]),
    )
    steps = scale.repeat_interleave(next(rows), 0).repeat_interleave(next(columns), 1)
    assert ((dequantize(q, scale) - x).abs() <= steps * 0.5001).all()
    assert q.abs().max() == 127
    assert torch.equal(quantize(-x, scale), -q)


def test_a_block_of_zeros_has_a_positive_scale():
    scale = choose_scale(block_absmax(torch.zeros(2, 4), (1, -1)))
    assert (scale == TINY_SCALE).all()
    assert (quantize(torch.zeros(2, 4), scale) == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_range_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        choose_scale(torch.tensor([1.0, bad]))


def test_nan_survives_the_absmax():
    assert block_absmax(torch.tensor([[1.0, float("nan")]]), (-1, -1)).isnan().all()


def test_a_block_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="does not divide"):
        block_absmax(torch.zeros(4, 6), (1, 4))
    with pytest.raises(ValueError, match="dimensions"):
        block_absmax(torch.zeros(4, 6), (4,))


def test_signal_to_noise():
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert sqnr_db(x, x) == float("inf")
    assert sqnr_db(x, x * 0) == pytest.approx(0.0)
    assert sqnr_db(x, x * 0.9) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(x, fake_quantize(x, torch.tensor(1 / 127))) > 120
