"""Layers whose sizes do not fill tiles, on a GPU: few and many rows, every kind of weight."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS: dict = {}
if torch.cuda.is_available():
    from inference.gpu import layers
    from tests.inference.gpu.test_gpu_sizes import KERNELS, made

SIZES = ((960, 576), (576, 1536), (1536, 640), (256, 896), (180, 180), (2880, 2880), (128, 10944))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("preset", "group"), KERNELS)
def test_layers_that_do_not_fill_tiles(preset, group, size, monkeypatch):
    outputs, inputs = size
    if group and inputs % group and preset != "fp8_block":
        pytest.skip("such scales do not fit the layer")
    if preset.startswith("fp8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    layer, exact = made(preset, group, outputs, inputs, device="cuda")
    assert (type(layer.weight).__name__, layer.weight.family) == KERNELS[preset, group]
    monkeypatch.setattr(layers, "_wider", None)  # nothing is copied to be filled up
    for rows in (1, 17, 64, 300, 2049):
        x = torch.randn(rows, inputs, device="cuda").half()
        wanted = x.float() @ exact.T
        found = layer(x).float()
        assert found.shape == wanted.shape
        off = ((found - wanted).norm() / wanted.norm()).item()
        assert off < (0.06 if preset[0] in "af" else 5e-3), (rows, off)
