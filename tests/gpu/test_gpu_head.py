"""A quantized head on a GPU, which may be the embedding, too: rows gathered, steps captured."""

from __future__ import annotations

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.models.decoder import Decoder
from inference.requests.request import SamplingParams
from kernels.numerics import dequantize
from tests.ptq.quantizing import quantize_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
IDS = torch.randint(1, 384, (60,), generator=torch.Generator().manual_seed(0))
COARSE = ("fp8_channel", "a8w4")


def decoder(engine: Engine) -> Decoder:
    assert isinstance(engine.model, Decoder)
    return engine.model


@pytest.mark.parametrize("vocabulary", [384, 1000])
@pytest.mark.parametrize("of_head", ["w8", "w4", "a8w8_dynamic", "fp8_channel", "a8w4"])
def test_a_tied_head_gives_the_logits_of_the_cpu(make_model, tmp_path, of_head, vocabulary):
    model = make_model("llama", vocab_size=vocabulary)
    path = quantize_head(model, tmp_path / "out", "w4", of_head).path
    cpu, gpu = (Engine.from_pretrained(path, device=device) for device in ("cpu", "cuda"))
    wanted, found = cpu.score(IDS), gpu.score(IDS).cpu()
    assert found.shape == wanted.shape == (len(IDS), vocabulary)
    assert (found - wanted).norm() / wanted.norm() < (0.1 if of_head in COARSE else 0.03)
    ids, own = torch.tensor([0, 63, 64, 127, 383, vocabulary - 1]), decoder(gpu)
    rows = own.embed(ids.cuda())
    assert torch.equal(rows.cpu(), decoder(cpu).embed(ids).to(own.dtype))


@pytest.mark.parametrize("of_head", ["w8", "w4", "a8w8_dynamic"])
def test_captured_steps_give_the_tokens_of_steps_one_by_one(make_model, tmp_path, of_head):
    path = quantize_head(make_model("llama", vocab_size=1000), tmp_path / "out", "w4", of_head).path
    prompts = [IDS[:n].tolist() for n in (5, 20, 33)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = [
        [
            out.token_ids
            for out in Engine.from_pretrained(
                path, device="cuda", config=EngineConfig(max_model_len=128, eager=eager)
            ).generate(prompts, params)
        ]
        for eager in (True, False)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(128256, 4096), (50257, 768)])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128)])
def test_rows_of_large_vocabularies(shape, bits, group):
    """Tiles lie beyond what 32 bits count."""
    from formats.scheme import LayerScheme, WeightSpec
    from inference.gpu.layers import pack_linear
    from inference.models.read import StoredLinear

    rows, columns = shape
    most = 1 << (bits - 1)
    made = torch.Generator("cuda").manual_seed(0)
    q = torch.randint(-most, most, shape, generator=made, device="cuda", dtype=torch.int8)
    groups = 1 if group is None else columns // group
    scale = torch.rand(rows, groups, generator=made, device="cuda") * 0.01 + 1e-3
    granularity = "per_channel" if group is None else "group"
    kind = "int8" if bits == 8 else "int4"
    spec = WeightSpec(dtype=kind, granularity=granularity, group_size=group)
    scale = scale.bfloat16().float()
    stored = StoredLinear([["lm_head"]], LayerScheme(weights=spec), q, scale)
    layer = pack_linear(stored, torch.bfloat16)
    ids = torch.tensor([0, 1, 4095, rows // 2, rows - 1], device="cuda")
    wanted = dequantize(q[ids], scale[ids], None, (1, group or columns)).bfloat16()
    assert layer.gathers
    assert torch.equal(layer.gather(ids, torch.bfloat16), wanted)
    x = torch.randn(3, columns, device="cuda", dtype=torch.bfloat16)
    logits = layer.run(x, None, torch.float32)
    assert logits.shape == (3, rows)
    exact = x.float() @ dequantize(q, scale, None, (1, group or columns)).T
    assert (logits - exact).norm() / exact.norm() < 5e-3
