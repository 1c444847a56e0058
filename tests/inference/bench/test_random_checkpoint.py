"""Checkpoints of random weights: what is in them, that they run, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from formats.files import sha256_file
from formats.foreign.mxfp4 import SCHEME as MXFP4
from inference.bench.load import Load, run_once
from inference.bench.random_model import RandomCheckpoint, random_checkpoint, random_tokenizer
from inference.bench.requests import EngineSource
from inference.bench.shapes import SHAPES, read_shape
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.engine import Engine
from inference.models.decoder import Decoder
from inference.requests.request import SamplingParams
from kernels.numerics import dequantize
from kernels.two_level import two_level
from tests.experts import MOE

TINY = SHAPES["llama-1.1b"] | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 384,
}


def shape_folder(folder: Path, **overrides: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | overrides))
    return str(folder)


@pytest.mark.parametrize("scheme", ["float", "a8w4c8", "a8w8", "w4", "fp8_channel"])
def test_it_runs(tmp_path, scheme):
    head = scheme != "float"
    path = random_checkpoint(tmp_path, shape_folder(tmp_path / "s"), scheme, quantize_head=head)
    engine = Engine.from_pretrained(path, config=EngineConfig(max_model_len=64))
    run = run_once(engine, Load(batch=2, prompt_tokens=9, new_tokens=3))
    assert run.decode_tokens == 4
    checkpoint = engine.checkpoint
    assert checkpoint.scheme.wac == {"fp8_channel": "af8wf8"}.get(scheme, scheme)
    assert len(checkpoint.quantized_modules) == (15 if head else 0)
    assert ("lm_head" in checkpoint.quantized_modules) is head
    if head:
        assert checkpoint.scheme_of("lm_head").text == (
            "int8 weights per_channel, dynamic int8 inputs per_token"
        )


@pytest.mark.parametrize(
    ("scheme", "wac"), [("float", "mxfp4"), ("a8w8c8", "a8w8c8"), ("c8", "mxfp4c8")]
)
def test_experts_of_gpt_oss_are_in_mxfp4_whatever_the_scheme(tmp_path, monkeypatch, scheme, wac):
    small = TINY | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
    small |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", SHAPES["gpt-oss-20b"] | small)
    path = random_checkpoint(tmp_path, "gpt-oss-20b", scheme)
    engine = Engine.from_pretrained(path, config=EngineConfig(max_model_len=64))
    assert run_once(engine, Load(batch=2, prompt_tokens=9, new_tokens=3)).decode_tokens == 4
    found = engine.checkpoint
    assert found.scheme.wac == wac
    assert found.scheme_of("model.layers.1.mlp.experts.3.down_proj") == MXFP4
    module = "model.layers.1.mlp.experts.3.up_proj"
    made = RandomCheckpoint("gpt-oss-20b", scheme, "cpu").weight(module)
    stood = RandomCheckpoint("gpt-oss-20b", "float", "cpu").tensor(f"{module}.weight").float()
    values = (made.q.float().unflatten(1, (-1, 32)) * made.scale[..., None]).flatten(1)
    assert (values - stood).norm() < 0.15 * stood.norm()


@pytest.mark.parametrize("family", MOE)
def test_mixtures_run(tmp_path, family):
    sizes = MOE[family] | {"model_type": family}
    shape = shape_folder(tmp_path / "s", **sizes)
    engine = Engine.from_pretrained(
        random_checkpoint(tmp_path, shape, "a8w8c8"), config=EngineConfig(max_model_len=64)
    )
    assert run_once(engine, Load(batch=2, prompt_tokens=9, new_tokens=3)).decode_tokens == 4
    experts = [name for name in engine.checkpoint.quantized_modules if ".experts." in name]
    number = sizes.get("num_experts", sizes.get("num_local_experts"))
    assert len(experts) == 3 * number * (1 if "mlp_only_layers" in sizes else 2)


def test_prompts_in_chunks_with_a_quantized_head(tmp_path):
    path = random_checkpoint(tmp_path, shape_folder(tmp_path / "s"), "a8w8", quantize_head=True)
    tokens = []
    for most in (4, 64):
        config = EngineConfig(max_model_len=64, max_batched_tokens=most)
        engine = Engine.from_pretrained(path, config=config)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        tokens.append(engine.generate([list(range(17))], params)[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("scheme", ["a8w4", "a8w8_dynamic", "a8w4_two_level", "w4_q4_k"])
def test_weights_are_gaussian_and_rounded_to_nearest(tmp_path, scheme):
    shape = shape_folder(tmp_path / "s")
    plain = Checkpoint.open(random_checkpoint(tmp_path, shape, "float"))
    quantized = Checkpoint.open(random_checkpoint(tmp_path, shape, scheme))
    for module in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"):
        weight, stored = plain.tensor(f"{module}.weight").float(), quantized.weight(module)
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
        block = quantized.scheme.weights.block  # pyright: ignore[reportOptionalMemberAccess]
        error = (dequantize(stored.q, stored.scale, stored.zero_point, block) - weight).abs()
        step = stored.scale.repeat_interleave(weight.shape[1] // stored.scale.shape[1], 1)
        assert bool((error <= step * 0.51 + 1e-6).float().mean() > 0.98)  # int4 cuts the largest
        assert scheme != "a8w4_two_level" or two_level(stored.scale) is not None
        if scheme == "a8w4":
            assert torch.equal(stored.scale.bfloat16().float(), stored.scale)
    norm = quantized.tensor("model.norm.weight")
    assert torch.equal(norm, torch.ones_like(norm))
    assert "lm_head" not in quantized.quantized_modules


def test_the_same_bytes_twice_and_no_more_work_the_third_time(tmp_path):
    shape = shape_folder(tmp_path / "s")
    first = random_checkpoint(tmp_path / "a", shape, "a8w4c8", quantize_head=True)
    second = random_checkpoint(tmp_path / "b", shape, "a8w4c8", quantize_head=True)
    files = {p.relative_to(first): sha256_file(p) for p in first.rglob("*") if p.is_file()}
    again = {p.relative_to(second): sha256_file(p) for p in second.rglob("*") if p.is_file()}
    assert files == again
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint(tmp_path / "a", shape, "a8w4c8", quantize_head=True) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    other = shape_folder(tmp_path / "s", vocab_size=385)
    names = {random_checkpoint(tmp_path / "a", other, "a8w4c8", quantize_head=h) for h in (0, 1)}
    assert len({first, *names}) == 3


def test_biases_and_tied_heads_of_other_families(tmp_path):
    shape = shape_folder(tmp_path / "s", model_type="qwen2", tie_word_embeddings=True)
    path = random_checkpoint(tmp_path, shape, "a8w8_dynamic")
    engine = Engine.from_pretrained(path, config=EngineConfig(max_model_len=64))
    assert "model.layers.0.self_attn.q_proj.bias" in engine.checkpoint
    assert "lm_head.weight" not in engine.checkpoint
    assert run_once(engine, Load(batch=1, prompt_tokens=4, new_tokens=2)).decode_tokens == 1


def test_the_named_shape_is_the_one_that_peers_were_measured_on():
    name, config = read_shape("llama-1.1b")
    assert (name, config["hidden_size"], config["vocab_size"]) == ("llama-1.1b", 2048, 32000)
    assert config["max_position_embeddings"] == 16384


@pytest.mark.parametrize(
    ("scheme", "head", "overrides", "message"),
    [
        ("a9w9", False, {}, r"scheme: found 'a9w9'; did you mean 'a8w8'\? allowed: float, w8, w4"),
        ("float", True, {}, r"quantize_head: found scheme float"),
        ("c8", True, {}, r"quantize_head: found scheme c8"),
        ("a8w8", True, {"tie_word_embeddings": True}, r"tie_word_embeddings True"),
        ("a8w8", False, {"model_type": "gpt2"}, r"model_type 'gpt2' of .*; random checkpoints"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, scheme, head, overrides, message):
    shape = shape_folder(tmp_path / "s", **overrides)
    with pytest.raises(RequestError, match=message):
        random_checkpoint(tmp_path / "w", shape, scheme, quantize_head=head)
    assert not (tmp_path / "w").exists()


def test_a_shape_that_is_none_is_refused(tmp_path):
    with pytest.raises(
        RequestError,
        match=rf"found 'lama'; did you mean 'llama-3-8b'\? allowed: {', '.join(SHAPES)}, or the",
    ):
        read_shape("lama")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="Invalid JSON"):
        read_shape(str(tmp_path / "config.json"))
    (tmp_path / "mine.json").write_text(json.dumps(SHAPES["llama-3-8b"]))
    name, config = read_shape(str(tmp_path / "mine.json"))
    assert (name, config["hidden_size"]) == ("mine", 4096)
    with pytest.raises(RequestError, match="allowed: "):
        read_shape(str(tmp_path / "none.json"))


def test_a_random_model_is_made_where_it_runs(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    source = EngineSource("tiny-a8w8c8", EngineConfig(), random=("tiny", "a8w8c8", True))
    assert source.checkpoint().scheme.wac == "a8w8c8"
    engine = source.load()
    run = run_once(engine, Load(batch=2, prompt_tokens=9, new_tokens=3))
    assert (run.decode_tokens, run.weight_bytes) == (4, engine.model.weight_bytes)
    assert engine.checkpoint.scheme_of("lm_head").text.startswith("int8 weights per_channel")


def test_a_random_tied_head_is_the_embedding_too(monkeypatch):
    monkeypatch.setitem(SHAPES, "tied", TINY | {"tie_word_embeddings": True})
    made = RandomCheckpoint("tied", "w4", "cpu", quantize_head=True, head="w8")
    tokenizer = random_tokenizer(int(made.config["vocab_size"]))
    engine = Engine(made, tokenizer, EngineConfig(), CpuBackend())
    assert made.shares_head
    assert isinstance(engine.model, Decoder)
    assert engine.model.embedding is None
    assert torch.isfinite(engine.score(torch.arange(5))).all()


def test_a_random_nvfp4_weight_is_one_that_kernels_take(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    made = RandomCheckpoint("tiny", "nvfp4", "cpu")
    stored = made.weights(["model.layers.0.mlp.down_proj"])
    assert stored.unit is not None
    multiples = stored.scale / stored.unit
    assert torch.equal(multiples, multiples.to(torch.float8_e4m3fn).float())


def test_the_random_tokenizer_encodes_what_it_decodes():
    tokenizer = random_tokenizer(100)
    assert tokenizer("t17 t4 t99")["input_ids"] == [17, 4, 99]
    assert tokenizer.decode([17, 4, 99]) == "t17 t4 t99"


def test_a_model_that_is_never_written_has_a_centred_int4_cache(monkeypatch):
    monkeypatch.setitem(SHAPES, "llama-1.1b", SHAPES["llama-1.1b"] | TINY)
    made = RandomCheckpoint("llama-1.1b", "c4", "cpu")
    assert made.scheme.kv_cache.center_keys
    assert len(made.kv_offsets) == TINY["num_hidden_layers"]
    assert all(not offset.any() for offset in made.kv_offsets.values())
    assert all(
        seen.equal(torch.eye(seen.shape[1]).expand_as(seen)) for seen in made.query_moments.values()
    )
