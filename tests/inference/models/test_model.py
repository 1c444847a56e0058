"""The decoder computes what transformers computes, and quantized what its integers say."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.fake_quantized import fake_quantized_logits
from tests.families import distance, transformers_logits
from tests.inference.engines import engine_of

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]


def token_ids(count=150) -> torch.Tensor:
    return torch.randint(1, 384, (count,), generator=torch.Generator().manual_seed(0))


def check_float(folder: Path) -> None:
    got = Engine.from_pretrained(folder).score(token_ids())
    want = transformers_logits(folder, token_ids())
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers(make_model, family, tied):
    overrides = {"sliding_window": 40} if family == "mistral" else {}
    check_float(make_model(family, tie_word_embeddings=tied, **overrides))


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
    check_float(make_model("llama", rope_parameters=rope))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8_dynamic", "c8"])
def test_a_quantized_checkpoint_computes_what_its_numbers_say(
    make_model, make_quantized, family, preset
):
    """Against transformers with dequantized weights, and with inputs, K and V rounded by hand."""
    out, ids = make_quantized(make_model(family), preset), token_ids(100)
    got, want = (
        Engine.from_pretrained(out).score(ids),
        fake_quantized_logits(Checkpoint.open(out), ids),
    )
    # A last bit can move a value over a rounding edge, so the bound is on the whole.
    assert distance(got, want) < 1e-2
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
            parts = engine_of(folder, max_batched_tokens=most).score(token_ids())
            assert torch.equal(parts, whole), most


def test_input_scales_of_merged_layers_must_agree(tiny_llama, make_quantized, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(make_quantized(tiny_llama, "a8w8"), copy)
    shutil.rmtree(copy / "quant")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="input scales"):
        Engine.from_pretrained(copy)


def stored_as(source, folder, dtype):
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = {name: t.half().to(dtype) for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_fp16_takes_half_of_fp32_and_has_its_bits(make_model, tmp_path, tied):
    """Float weights are kept in the type of the checkpoint."""
    source, ids = make_model("llama", tie_word_embeddings=tied), list(range(3, 60))
    half, whole = (
        Engine.from_pretrained(stored_as(source, tmp_path / str(dtype), dtype))
        for dtype in (torch.float16, torch.float32)
    )
    assert half.model.embedding.dtype == torch.float16
    assert half.model.weight_bytes < 0.51 * whole.model.weight_bytes
    assert torch.equal(half.score(ids), whole.score(ids))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    wanted = [output.token_ids for output in whole.generate([ids, ids[:3]], params)]
    assert [output.token_ids for output in half.generate([ids, ids[:3]], params)] == wanted
