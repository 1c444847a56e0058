"""The whole decoder in one call gives the bits of its ops called one by one."""

import pytest
import torch

from inference.requests.request import SamplingParams
from kernels.cpu import native
from tests.inference.models.test_model import token_ids
from tests.inference.test_adapters import engine_of
from tests.tiny_families import TINY

if native.library() is None:
    pytest.skip("no C++ compiler, and no compiled kernels", allow_module_level=True)

SIZES = TINY | {"mistral": {"sliding_window": 40}}
SCHEMES = ["a8w8c8", "a8w8_dynamic", "a8w4", "w4", "w8", "fp8_channel", "fp8_tensor", "fp8_c8"]
SCHEMES += ["a8w4c8_two_level", "a8w4c4_two_level", "c4", "k8v4"]
FLOATS = ("llama", "qwen2", "qwen3", "mistral")
CASES = [  # family, scheme, and type of a cache of floats
    *((family, None, kv_dtype) for family in FLOATS for kv_dtype in ("float32", "bfloat16")),
    *((family, scheme, None) for family in ("olmo2", "phi3", *TINY) for scheme in (None, "a8w8c8")),
    *(("llama", scheme, None) for scheme in SCHEMES),
]


def scores(folder, *, fused: bool = True, **config) -> torch.Tensor:
    return engine_of(folder, {}, fused=fused, **config).score(token_ids(130))


@pytest.mark.parametrize(("family", "scheme", "kv_dtype"), CASES)
def test_models(make_model, make_quantized, family, scheme, kv_dtype, monkeypatch):
    """Floats, integers and a cache of integers; fused is what runs."""
    folder = make_quantized(make_model(family, **SIZES.get(family, {})), scheme)
    apart = scores(folder, fused=False, kv_dtype=kv_dtype)
    monkeypatch.setattr("inference.cpu.backend.forward_by_ops", None)
    assert torch.equal(scores(folder, kv_dtype=kv_dtype), apart)
    assert torch.isfinite(apart).all()


def test_mixed_batches(tiny_llama, make_quantized):
    """Decode steps beside chunks of prompts, requests that come and go."""
    folder = make_quantized(tiny_llama, "a8w8c8")
    prompts = [token_ids(n).tolist() for n in (3, 70, 1, 129, 64)]

    def answers(*, fused: bool) -> list[list[int]]:
        engine = engine_of(folder, {}, fused=fused, max_batched_tokens=33, max_batch_size=3)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [output.token_ids for output in engine.generate(prompts, params)]

    assert answers(fused=True) == answers(fused=False)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(tiny_llama, make_quantized, threads, with_threads):
    folder = make_quantized(tiny_llama, "a8w8c8")
    one = scores(folder)
    with_threads(threads)
    assert torch.equal(scores(folder), one)


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
