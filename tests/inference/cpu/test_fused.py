"""The whole decoder in one call gives the bits of its ops called one by one."""

from __future__ import annotations

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.request import SamplingParams
from kernels.cpu import native

if native.library() is None:
    pytest.skip("no C++ compiler, and no compiled kernels", allow_module_level=True)

SCHEMES = ["a8w8c8", "a8w8_dynamic", "a8w4", "w4", "w8", "fp8_channel", "fp8_tensor", "fp8_c8"]
SCHEMES += ["a8w4c8_two_level"]


def token_ids(count=130) -> torch.Tensor:
    return torch.randint(1, 384, (count,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def unfused(monkeypatch):
    """Makes engines that are loaded from now on run op by op."""

    def make() -> None:
        monkeypatch.setattr("inference.models.decoder.fuse", lambda model, pools: None)

    return make


def scores(folder, **config) -> torch.Tensor:
    return Engine.from_pretrained(folder, config=EngineConfig(**config)).score(token_ids())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_float_models(make_model, unfused, family, kv_dtype):
    overrides = {"sliding_window": 40} if family == "mistral" else {}
    folder = make_model(family, **overrides)
    fused = scores(folder, kv_dtype=kv_dtype)
    unfused()
    assert torch.equal(fused, scores(folder, kv_dtype=kv_dtype))
    assert torch.isfinite(fused).all()


@pytest.mark.parametrize("preset", SCHEMES)
def test_quantized_models(tiny_llama, make_quantized, unfused, preset):
    folder = make_quantized(tiny_llama, preset)
    fused = scores(folder)
    unfused()
    assert torch.equal(fused, scores(folder))


def test_fused_is_what_runs(tiny_llama, monkeypatch):
    monkeypatch.setattr("inference.models.decoder.LlamaModel.forward_by_ops", None)
    assert scores(tiny_llama).shape == (130, 384)


def test_mixed_batches(tiny_llama, make_quantized, unfused):
    """Decode steps beside chunks of prompts, requests that come and go."""
    folder = make_quantized(tiny_llama, "a8w8c8")
    prompts = [token_ids(n).tolist() for n in (3, 70, 1, 129, 64)]
    config = EngineConfig(max_batched_tokens=33, max_batch_size=3)

    def answers() -> list[list[int]]:
        engine = Engine.from_pretrained(folder, config=config)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [output.token_ids for output in engine.generate(prompts, params)]

    fused = answers()
    unfused()
    assert fused == answers()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(tiny_llama, make_quantized, threads):
    folder, before = make_quantized(tiny_llama, "a8w8c8"), torch.get_num_threads()
    one = scores(folder)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(scores(folder), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("preset", ["a8w8c8", "w4", "fp8_channel"])
def test_without_a_compiler_the_same_comes_out_of_torchs_ops(
    tiny_llama, make_quantized, monkeypatch, preset
):
    folder = make_quantized(tiny_llama, preset)
    compiled = scores(folder)
    monkeypatch.setattr(native, "library", lambda: None)
    plain = scores(folder)
    # A last bit can move an input over a rounding edge, and a step of e4m3 is 6% of a number.
    bound = 3e-2 if preset.startswith("fp8") else 5e-3
    assert (compiled - plain).norm() / plain.norm() < bound
    assert not torch.equal(compiled, plain)
