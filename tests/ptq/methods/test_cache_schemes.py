"""Every way to quantize the cache, from calibration to the engine."""

from __future__ import annotations

import itertools

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.scheme import KVCacheSpec, Scheme, WeightSpec
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from tests.ptq.quantizing import make_plan, random_tokens

GRANULARITIES = ("per_head", "per_tensor", "per_channel", "per_token_head")


@pytest.mark.parametrize(
    ("dtype", "granularity"), itertools.product(("int8", "fp8_e4m3"), GRANULARITIES)
)
def test_cache_from_calibration_to_tokens(tiny_llama, tmp_path, dtype, granularity):
    spec = KVCacheSpec(dtype=dtype, granularity=granularity)
    plan = make_plan(tiny_llama, tmp_path / "out", Scheme(kv_cache=spec), methods=())
    result = quantize_tokens(plan, random_tokens(), progress=False)
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.scheme.kv_cache == spec
    entries = [row for row in result.scale_table.entries if row.role in ("k_cache", "v_cache")]
    assert len(entries) == (0 if spec.dynamic else 4)
    assert all(row.dtype == dtype for row in entries)
    if not spec.dynamic:
        k, v = checkpoint.kv_scales["model.layers.1.self_attn"]
        assert k.shape == ((2, 32) if granularity == "per_channel" else (2,))
        assert v.shape == (2,)
    ids = torch.arange(1, 90) * 7 % 384
    exact = Engine.from_pretrained(tiny_llama).score(ids).log_softmax(-1)
    engine = Engine.from_pretrained(result.checkpoint)
    assert engine.quantized_kv
    found = engine.score(ids).log_softmax(-1)
    divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
    assert 0 < divergence < (0.01 if dtype == "int8" else 0.1)
    prompts = [ids[:5].tolist(), ids[:70].tolist()]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    together = [out.token_ids for out in engine.generate(prompts, params)]
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert together == alone
    token = {"int8": 1, "fp8_e4m3": 1}[dtype] * 2 * 2 * 2 * 32
    assert engine.kv_bytes_per_token == token + (2 * 2 * 2 * 4 if spec.dynamic else 0)


def test_finer_scales_of_k_lose_less(make_model, tmp_path):
    """With outlier channels in K, a scale for each channel beats one for each head."""
    from safetensors.torch import load_file, save_file

    model = make_model("llama", seed=3)
    source = tmp_path / "model"
    source.mkdir()
    for path in model.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor[[5, 21, 37, 53]] *= 30
        if name.endswith("q_proj.weight"):
            tensor[[i for i in range(128) if i % 16 == 5]] /= 32
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    ratios = {}
    for granularity in ("per_head", "per_channel"):
        spec = KVCacheSpec(granularity=granularity)
        plan = make_plan(source, tmp_path / granularity, Scheme(kv_cache=spec), methods=())
        result = quantize_tokens(plan, random_tokens(), progress=False)
        ids = torch.arange(1, 90) * 7 % 384
        exact = Engine.from_pretrained(source).score(ids).log_softmax(-1)
        found = Engine.from_pretrained(result.checkpoint).score(ids).log_softmax(-1)
        ratios[granularity] = (exact.exp() * (exact - found)).sum(-1).mean().item()
    assert ratios["per_channel"] < 0.7 * ratios["per_head"]


def test_weights_alone_take_a_cache_with_them(tiny_llama, tmp_path):
    spec = WeightSpec(dtype="int4", granularity="group", group_size=64, symmetric=False)
    scheme = Scheme(weights=spec, kv_cache=KVCacheSpec(dtype="fp8_e4m3"))
    assert scheme.wac == "w4cf8_g64_asymmetric"
    plan = make_plan(tiny_llama, tmp_path / "out", scheme, methods=(RTNSpec(scale="mse"),))
    result = quantize_tokens(plan, random_tokens(), progress=False)
    assert Checkpoint.open(result.checkpoint).scheme == scheme
    text = Engine.from_pretrained(result.checkpoint).generate(
        ["def f"], SamplingParams(max_tokens=4, ignore_eos=True)
    )[0]
    assert len(text.token_ids) == 4
