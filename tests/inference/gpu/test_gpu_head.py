"""A quantized head that is the embedding, too, by the GPU's kernels, interpreted."""

import pytest
import torch

from formats.scheme import PRESETS
from inference.bench.random_model import round_to_nearest
from inference.gpu.layers import pack_linear
from inference.models.decoder import Decoder
from inference.models.read import StoredLinear
from kernels.numerics import dequantize
from tests.inference.gpu.test_gpu import compare, engine_of
from tests.kernels.triton_lab import distance, interpreted
from tests.ptq.quantizing import quantize_head

LAYOUTS = ["w8", "w4", "a8w8_dynamic", "fp8_channel", "a8w4"]  # of the last no rows are gathered


@pytest.mark.parametrize(
    ("of_head", "hidden"), [*((layout, 128) for layout in LAYOUTS), ("w8", 192)]
)
@interpreted
def test_a_tied_head_gives_the_logits_of_the_cpu(make_model, tmp_path, of_head, hidden):
    """Its 1,000 outputs are no multiple of a tile's, 192 inputs neither."""
    model = make_model("llama", layers=1, vocab_size=1000, hidden_size=hidden)
    path = str(quantize_head(model, tmp_path / "out", "w8", of_head).path)
    compare(path, 0.1 if of_head in ("fp8_channel", "a8w4") else 0.03)
    model, on_cpu = (decoder(engine_of(path, triton=triton)) for triton in (True, False))
    assert (model.embedding is None) is (of_head != "a8w4")
    assert model.head.outputs == 1000
    ids = torch.tensor([0, 63, 64, 127, 999, 5])
    assert torch.equal(model.embed(ids), on_cpu.embed(ids).to(model.dtype))


def decoder(engine) -> Decoder:
    assert isinstance(engine.model, Decoder)
    return engine.model


@interpreted
def test_layers_are_filled_up_to_whole_tiles():
    """250 outputs and 2,016 inputs are no multiples of 64 and 128."""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(250, 2016) * 0.02, torch.randn(3, 2016).half(), torch.randn(250)
    for preset in ("w8", "w4_asymmetric_g32", "a8w8_dynamic", "fp8_channel"):
        scheme = PRESETS[preset.removesuffix("_g32").removesuffix("_asymmetric")].of_layers
        assert scheme.weights is not None
        if preset.endswith("_g32"):
            grouped = {"group_size": 32, "symmetric": "asymmetric" not in preset}
            scheme = scheme.model_copy(
                update={"weights": scheme.weights.model_copy(update=grouped)}
            )
        assert scheme.weights is not None
        stored = round_to_nearest(weight, scheme)
        tensors = (stored.q, stored.scale, stored.zero_point, bias)
        layer = pack_linear(StoredLinear([["layer"]], scheme, *tensors), torch.float16)
        assert layer.outputs == 250, preset
        assert layer.missing == 32
        exact = dequantize(stored.q, stored.scale, stored.zero_point, scheme.weights.block)
        found, wanted = layer(x), x.float() @ exact.T + bias
        assert found.shape == (3, 250)
        assert distance(found, wanted) < (0.05 if scheme.activations else 5e-3)
        rows = layer.gather(torch.tensor([0, 249]), torch.float32)
        assert rows.is_contiguous(), "the first norm reads whole rows"
        assert torch.allclose(rows, exact[[0, 249]], atol=1e-6)
