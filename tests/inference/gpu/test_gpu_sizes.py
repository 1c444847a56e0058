"""Layers of any size run on kernels: which kernel each layer of public models gets, and its result.

Sizes are those of SmolLM2 (576, 960), Qwen2 (896), gpt-oss (2,880), DeepSeek-V2-Lite (10,944) and
of heads of 20 to 256 numbers; rows and columns of filling are no input's or output's business.
"""

import pytest
import torch

from formats.scheme import PRESETS
from inference.bench.random_model import round_to_nearest
from inference.gpu import layers
from inference.gpu.feed_forward import side_by_side
from inference.gpu.layers import GpuLinear, as_wanted, pack_linear
from inference.models.read import StoredLinear
from kernels.numerics import dequantize
from kernels.triton.experts import sort_by_expert
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from tests.kernels.triton_lab import distance, interpreted

KERNELS = {  # by scheme and group
    ("a8w8", None): ("W8A8Weight", "w8a8"),
    ("a8w8_dynamic", None): ("W8A8Weight", "w8a8"),
    ("fp8_channel", None): ("W8A8Weight", "fp8"),
    ("fp8_tensor", None): ("W8A8Weight", "fp8"),
    ("fp8_block", 128): ("Fp8BlockWeight", "fp8_block"),
    ("w8", None): ("W8A16Weight", "w8a16"),
    ("w4", 32): ("W4A16Weight", "w4a16"),
    ("w4", 64): ("W4A16Weight", "w4a16"),
    ("w4", 128): ("W4A16Weight", "w4a16"),
    ("a8w4", 32): ("W4A8Weight", "w4a8"),
    ("a8w4", 64): ("W4A8Weight", "w4a8"),
}
SIZES = {  # outputs and inputs
    "SmolLM2-135M q, k, v": (960, 576),
    "SmolLM2-135M down": (576, 1536),
    "SmolLM2-360M o": (960, 960),
    "Gemma 3 270M q, k, v": (1536, 640),
    "Qwen2-0.5B gate, up": (256, 896),  # (of 9,728)
    "gpt-oss o": (128, 2880),  # (of 2,880 outputs)
    "DeepSeek-V2-Lite down": (64, 10944),  # (of 2,048)
    "9 heads of 20": (180, 180),
    "5 heads of 96": (480, 480),
    "3 heads of 80": (240, 240),
}


@pytest.mark.parametrize("size", SIZES)
@interpreted
def test_every_layer_has_a_kernel(size):
    outputs, inputs = SIZES[size]
    for (preset, group), wanted in KERNELS.items():
        if group not in (None, 128) and inputs % group:
            continue  # such scales do not fit the layer
        if group == 128 and preset == "w4" and inputs % 128:
            continue
        layer, _ = made(preset, group, outputs, inputs)
        weight, rows, long = layer.weight, layer.rows, -(-inputs // 128) * 128
        assert (type(weight).__name__, weight.family) == wanted, (size, preset, group)
        assert weight.size[1] == long
        short = weight.SHORT_ROWS and inputs % 16 == 0
        assert rows.length == (long if long > inputs and not short else None)
        assert layer.outputs == (None if weight.size[0] == outputs else outputs)


@pytest.mark.parametrize("stacked", [False, True])
@interpreted
def test_results_are_those_of_the_layer_without_filling(stacked):
    """Kernels take short rows, or these are filled up where they are quantized: nothing is copied
    for that."""

    def copied(*_):
        raise AssertionError("rows are copied to be filled up")

    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(5)).half()
    for preset, group in KERNELS:
        if (preset, group) == ("w4", 128) or (stacked and preset == "a8w8"):
            continue
        count = 3 if stacked else None
        layer, exact = made(preset, group, 90, 192, count)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "_wider", copied)
            if stacked:
                chosen = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32)[:, None]
                experts = side_by_side([(layer, "layer")], 3)
                rows = experts.merged.quantized(x, chosen.view(-1))
                pairs = sort_by_expert(chosen, 3, 16)
                found = experts.merged.run(*rows, pairs, torch.float16)
                one = experts.each[2](x)
                wanted = torch.einsum("tk,tnk->tn", x.float(), exact[chosen[:, 0].long()])
                assert (one.float() - x.float() @ exact[2].T).norm() < 0.06 * wanted.norm()
            else:
                found, wanted = layer(x), x.float() @ exact.T
        assert found.shape == (5, 90)
        near = 0.05 if preset[0] in "af" else 5e-3
        assert distance(found, wanted) < near, (preset, group)


def made(
    preset: str,
    group: int | None,
    outputs: int,
    inputs: int,
    count: int | None = None,
    device: str = "cpu",
    *,
    symmetric: bool = True,
    bias: torch.Tensor | None = None,
):
    """A packed layer, or a stack of some, and what it stands for."""
    scheme = PRESETS[preset].of_layers
    if group not in (None, 128):
        changes = {"group_size": group, "symmetric": symmetric}
        weights = scheme.weights.model_copy(update=changes)
        scheme = scheme.model_copy(update={"weights": weights})
    generator, block = torch.Generator().manual_seed(outputs), scheme.weights.block
    each, exact = [], []
    for _ in range(count or 1):
        own = round_to_nearest(torch.randn(outputs, inputs, generator=generator) * 0.02, scheme)
        height = outputs if block[0] == -1 else block[0]  # rows that share scales, which are spread
        scale = own.scale.repeat_interleave(height, 0)[:outputs]
        each.append((own.q, scale, own.zero_point))
        exact.append(dequantize(own.q, own.scale, own.zero_point, block))
    parts = [None if t[0] is None else torch.stack(t) for t in zip(*each, strict=True)]
    q, scale, zero = parts if count else (None if t is None else t[0] for t in parts)
    static = torch.full((*([count] if count else []), 1), 0.03) if scheme.static_input else None
    names = [["layer"]] * (count or 1)
    q, scale, zero, static = (None if t is None else t.to(device) for t in (q, scale, zero, static))
    assert q is not None
    stored = StoredLinear(names, scheme, q, scale, zero, bias, input_scale=static)
    whole = torch.stack(exact) if count else exact[0]
    return pack_linear(stored, torch.float16), whole.to(device)


@interpreted
def test_layers_are_filled_up_to_whole_tiles():
    """250 outputs and 2,016 inputs are no multiples of 64 and 128."""
    torch.manual_seed(0)
    x, bias = torch.randn(3, 2016).half(), torch.randn(250)
    for preset, group in (("w8", None), ("w4", 32), ("a8w8_dynamic", None), ("fp8_channel", None)):
        layer, exact = made(preset, group, 250, 2016, symmetric=preset != "w4", bias=bias)
        assert layer.outputs == 250, preset
        assert layer.missing == 32
        found, wanted = layer(x), x.float() @ exact.T + bias
        assert found.shape == (3, 250)
        assert distance(found, wanted) < (0.05 if preset[0] in "af" else 5e-3)
        rows = layer.gather(torch.tensor([0, 249]), torch.float32)
        assert rows.is_contiguous(), "the first norm reads whole rows"
        assert torch.allclose(rows, exact[[0, 249]], atol=1e-6)


@interpreted
def test_rows_begin_where_the_hardware_can_fetch_them():
    """One row out of another layer's outputs is contiguous wherever it begins."""
    outputs = torch.randn(1, 40).bfloat16()
    for own in (outputs[:, 3:35], outputs[:, :32]):
        rows, _ = as_wanted(own, InputFormat(own.dtype))
        assert torch.equal(rows, own)
        assert rows.data_ptr() % 16 == 0
    assert rows.data_ptr() == outputs.data_ptr()  # no copy where none is needed


@interpreted
def test_a_layer_with_one_order_of_sums_takes_no_rows():
    """As the head does in a step whose prompts all go on."""
    weight = torch.randn(192, 640, generator=torch.Generator().manual_seed(0)).half()
    layer = GpuLinear(DenseWeight(weight, None), InputFormat(torch.float16), invariant=True)
    assert layer(weight[:0]).shape == (0, 192)
    found, wanted = layer(weight[:3]).float(), weight[:3].float() @ weight.float().T
    assert torch.allclose(found, wanted, rtol=1e-2, atol=0.1)
