"""The decoder computes what transformers computes, and quantized what its integers say."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.config import EngineConfig
from inference.engine import Engine
from kernels.numerics import dequantize, fake_quantize

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]


def token_ids(count=150) -> torch.Tensor:
    return torch.randint(1, 384, (count,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers(make_model, family, tied):
    overrides = {"sliding_window": 40} if family == "mistral" else {}
    folder = make_model(family, tie_word_embeddings=tied, **overrides)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = token_ids()
    with torch.no_grad():
        want = theirs(ids[None]).logits[0]
    got = Engine.from_pretrained(folder).score(ids)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 1e4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings(make_model, rope):
    folder = make_model("llama", rope_parameters=rope)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(token_ids()[None]).logits[0]
    got = Engine.from_pretrained(folder).score(token_ids())
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8_dynamic", "c8"])
def test_a_quantized_checkpoint_computes_what_its_numbers_say(
    make_model, make_quantized, family, preset
):
    """Against transformers with dequantized weights and fake-quantized inputs, K and V."""
    from calibrate.attention import _CALLBACK, ATTENTION

    source = make_model(family)
    out = make_quantized(source, preset)
    checkpoint = Checkpoint.open(out)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation=ATTENTION
    )
    for name in checkpoint.quantized_modules:
        linear = model.get_submodule(name)
        scale = checkpoint.tensor(f"{name}.weight_scale")
        linear.weight.data = dequantize(checkpoint.tensor(f"{name}.weight"), scale)
        step = checkpoint.tensor(f"{name}.input_scale")[0] if preset == "a8w8c8" else None

        def hook(_, inputs, step=step):
            x = inputs[0][0]
            scale = (x.abs().amax(-1, keepdim=True) / 127) if step is None else step
            return (fake_quantize(x, scale)[None],)

        linear.register_forward_pre_hook(hook)
    for i, layer in enumerate(model.model.layers):
        if preset == "a8w8_dynamic":
            break
        scales = checkpoint.kv_scales[f"model.layers.{i}.self_attn"]

        def cached(k, v, scales=scales):
            for x, scale in zip((k, v), scales, strict=True):
                x.copy_(fake_quantize(x, scale.reshape(1, -1, 1)))

        setattr(layer.self_attn, _CALLBACK, cached)
    ids = token_ids(100)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = Engine.from_pretrained(out).score(ids)
    # A last bit can move a value over a rounding edge, so the bound is on the whole.
    assert (got - want).norm() / want.norm() < 1e-2
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.97


def test_the_cache_is_int8_only_where_it_is_calibrated_and_wanted(tiny_llama, make_quantized):
    quantized = make_quantized(tiny_llama)
    a, b = Engine.from_pretrained(quantized), Engine.from_pretrained(quantized, quantized_kv=False)
    c = Engine.from_pretrained(tiny_llama)
    assert a.quantized_kv
    assert not b.quantized_kv
    assert not c.quantized_kv
    assert a.kv_bytes_per_token == 2 * 2 * 2 * 32  # layers, K and V, heads, head_dim
    assert b.kv_bytes_per_token == c.kv_bytes_per_token == 4 * a.kv_bytes_per_token
    ids = token_ids(60)
    assert not torch.equal(a.score(ids), b.score(ids))


def test_scoring_in_chunks_gives_the_same_bits(tiny_llama, make_quantized):
    for folder in (tiny_llama, make_quantized(tiny_llama)):
        whole = Engine.from_pretrained(folder).score(token_ids())
        for most in (1, 7, 64):
            config = EngineConfig(max_batched_tokens=most)
            parts = Engine.from_pretrained(folder, config=config).score(token_ids())
            assert torch.equal(parts, whole), most


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"hidden_act": "relu"}, "relu"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_what_is_not_run_here_is_refused_by_name(tiny_llama, tmp_path, change, word):
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama, copy)
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=word):
        Engine.from_pretrained(copy)


def test_input_scales_of_merged_layers_must_agree(tiny_llama, make_quantized, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "model"
    shutil.copytree(make_quantized(tiny_llama, "a8w8"), copy)
    shutil.rmtree(copy / "quant")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="input scales"):
        Engine.from_pretrained(copy)
