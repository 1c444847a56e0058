"""Layers in NVFP4, MXFP4 and MXFP8 on a CPU: products are those of the weights they stand for."""

import pytest
import torch

from formats.scheme import PRESETS
from inference.cpu.layers import pack_linear
from inference.models.read import StoredLinear
from kernels.numerics import dequantize
from ptq.methods.common.rounding import round_weight


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4", "mxfp8"])
def test_products_are_those_of_the_weights(preset, rows):
    torch.manual_seed(0)
    scheme = PRESETS[preset].of_layers
    assert scheme.weights is not None
    stored = round_weight(torch.randn(72, 160), scheme.weights, torch.float32, "mse")
    bias, x = torch.randn(72), torch.randn(rows, 160)
    layer = pack_linear(
        StoredLinear([["layer"]], scheme, stored.q, stored.scale, bias=bias), torch.float32
    )
    weight = dequantize(stored.q, stored.scale, block=scheme.weights.block)
    wanted = x.double() @ weight.double().T + bias.double()
    short = scheme.weights.dtype == "fp4_e2m1"  # integers in groups, whose inputs are int16
    atol, rtol = (5e-3, 0) if short else (1e-4, 1e-4)
    torch.testing.assert_close(layer(x).double(), wanted, atol=atol, rtol=rtol)
