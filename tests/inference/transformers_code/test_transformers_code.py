"""Models that run by transformers' own code: its logits, and an engine that knows no difference."""

from __future__ import annotations

import logging

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.beam_search import BeamParams, beam_search
from inference.config import EngineConfig
from inference.engine import Engine
from inference.models.decoder import Decoder
from inference.requests.request import SamplingParams
from inference.transformers_code.model import CodeModel
from tests.conftest import write_random
from tests.families import check_engine, distance, transformers_logits
from tests.tiny_models import tiny_config

EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
}
KINDS = {  # what each has that Llama has not
    "biogpt": {},  # learned positions, a bias everywhere
    "bloom": {"n_head": 4},  # biases by distance (ALiBi), no positions
    "cohere2": {"sliding_window": 16},  # parallel sub-layers, LayerNorm, scaled logits
    "deepseek_v2": LATENT,  # V's heads smaller than K's, dense and mixed blocks
    "gemma2": {"sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_neox": {"rotary_pct": 0.5},  # q, k and v in one layer, interleaved by head
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmoe": {"intermediate_size": 32} | EXPERTS,  # norms of whole projections, experts
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},  # learned positions, ReLU
    "phi": {"partial_rotary_factor": 0.5},  # a bias of the head
    "stablelm": {"partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": 16},
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": False}
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def ids_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 384, (count,), generator=torch.Generator().manual_seed(seed))


def engine_of(folder, **config) -> Engine:
    sizes = {"max_batched_tokens": 16, "max_batch_size": 4, "transformers_code": True} | config
    return Engine.from_pretrained(folder, config=EngineConfig(**sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_transformers(make_model, kind):
    """In ragged batches of chunks and single tokens, found in the cache or computed again."""
    folder = make_model(kind, **(SMALL | KINDS[kind]))
    engine, ids = engine_of(folder), ids_of(50)
    assert isinstance(engine.model, CodeModel)
    assert distance(engine.score(ids.tolist()), transformers_logits(folder, ids)) < 1e-4
    prompts = [ids[:n].tolist() for n in (5, 33, 17, 40)]
    together = [o.token_ids for o in engine.generate(prompts, GREEDY)]
    engine.check_integrity()
    assert together == [engine.generate([p], GREEDY)[0].token_ids for p in prompts]
    whole = torch.cat((ids[:33], torch.tensor(together[1])))
    assert transformers_logits(folder, whole).argmax(-1)[32:-1].tolist() == list(together[1])


def test_preemption_and_the_prefix_cache_change_nothing(make_model):
    folder = make_model("gemma2", **(SMALL | KINDS["gemma2"]))
    prompts = [ids_of(n, seed=n).tolist() for n in (60, 70, 80, 90)]
    long = SamplingParams(max_tokens=80, ignore_eos=True)
    roomy = engine_of(folder)
    wanted = [o.token_ids for o in roomy.generate(prompts, long)]
    again = [o.token_ids for o in roomy.generate(prompts, long)]
    assert roomy.stats().hit_tokens == 3 * 64  # whole blocks of prompts of 64 tokens and more
    tight = engine_of(folder, max_model_len=192, kv_blocks=6)
    found = [o.token_ids for o in tight.generate(prompts, long)]
    assert tight.stats().preemptions > 0
    assert wanted == again == found


@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8_dynamic", "w4", "fp8_c8"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_quantized_layers_and_caches_are_those_of_the_fast_path(
    make_model, make_quantized, family, preset
):
    folder = make_quantized(make_model(family), preset)
    ids = ids_of(40).tolist()
    fast = engine_of(folder, transformers_code=False)
    slow = engine_of(folder)
    assert isinstance(fast.model, Decoder)
    assert [p.k.dtype for p in slow.pools] == [p.k.dtype for p in fast.pools]
    assert slow.model.weight_bytes == pytest.approx(fast.model.weight_bytes, rel=0.01)  # norms
    assert distance(slow.score(ids), fast.score(ids)) < 0.02


def test_experts_of_a_declared_mixture(make_model):
    folder = make_model("qwen3_moe", **(SMALL | EXPERTS))
    ids = ids_of(40)
    slow, fast = engine_of(folder), engine_of(folder, transformers_code=False)
    assert distance(slow.score(ids.tolist()), fast.score(ids.tolist())) < 1e-4


@pytest.mark.parametrize("spec", ["float32", "bfloat16"])
def test_the_cache_may_have_a_type_of_its_own(make_model, spec):
    folder = make_model("opt", **(SMALL | KINDS["opt"]))
    engine, ids = engine_of(folder, kv_dtype=spec), ids_of(40)
    near = 1e-4 if spec == "float32" else 0.02
    assert distance(engine.score(ids.tolist()), transformers_logits(folder, ids)) < near


def test_longrope_has_the_frequencies_of_the_longest_request(make_model):
    """However long the sequences of a batch are."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 64,
    }
    folder = make_model("phi3", rope_parameters=rope, sliding_window=None)
    ids = ids_of(100).tolist()
    for longest, tokens in ((64, ids[:60]), (256, ids), (256, ids[:40])):
        slow = engine_of(folder, max_model_len=longest)
        fast = engine_of(folder, max_model_len=longest, transformers_code=False)
        assert distance(slow.score(tokens), fast.score(tokens)) < 1e-4


def test_other_blocks_of_the_same_shape(make_model):
    """A variant shares all but its blocks."""
    a, b = (engine_of(make_model("stablelm", seed=s, **SMALL)) for s in (0, 1))
    ids = ids_of(20).tolist()
    mixed = a.variant([a.model.layers[0], b.model.layers[1]], a.pools)
    own, other = a.score(ids), mixed.score(ids)
    assert distance(other, own) > 0.01
    assert torch.equal(a.variant(a.model.layers, a.pools).score(ids), own)


@pytest.mark.parametrize("kind", ["rwkv", "recurrent_gemma"])
def test_what_keeps_another_state_is_refused(make_model, kind):
    folder = make_model(kind, **SMALL)
    with pytest.raises(CheckpointError, match=kind):
        engine_of(folder)


def test_a_missing_tensor_is_named(make_model, tmp_path):
    from tests.ptq.quantizing import edit_model

    source = make_model("opt", **(SMALL | KINDS["opt"]))
    name = "model.decoder.layers.0.self_attn.k_proj.bias"
    folder = edit_model(source, tmp_path / "damaged", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name):
        engine_of(folder)


def test_requests_are_no_longer_than_the_model_has_positions(make_model):
    with pytest.raises(EngineError, match="512 positions"):
        engine_of(make_model("opt", **(SMALL | KINDS["opt"])), max_model_len=513)


def test_requests_are_no_longer_than_a_chunk_of_attention(tmp_path, caplog):
    config = tiny_config("llama4_text")
    config.attention_chunk_size = 64
    folder = write_random(tmp_path / "model", config)
    check_engine(folder, ids_of(40), longest=64)
    assert "attends in chunks of 64 tokens, which requests have at most here" in caplog.text
    with pytest.raises(EngineError, match="more than the model's 64 positions"):
        Engine.from_pretrained(folder, config=EngineConfig(max_model_len=65))


def test_what_a_device_refuses_runs_there_by_transformers_code(make_model, monkeypatch, caplog):
    from inference.cpu.backend import CpuBackend

    def refuse(self, config):
        raise CheckpointError("llama: found something that is not run there")

    monkeypatch.setattr(CpuBackend, "check", refuse)
    with caplog.at_level(logging.WARNING, "ptq.inference"):
        engine = engine_of(make_model("llama"), transformers_code=False)
    assert isinstance(engine.model, CodeModel)
    assert "found something that is not run there; transformers' own code runs it" in caplog.text
    assert Checkpoint.open(make_model("llama")).config["model_type"] == "llama"


@pytest.mark.parametrize("preset", ["a8w8c8", "w4", "fp8_c8"])
def test_quantized_models_that_no_family_declares(make_model, make_quantized, preset):
    """Layers compute what transformers computes of the same checkpoint; the cache is near it."""
    folder = make_quantized(make_model("stablelm", tie_word_embeddings=False), preset)
    ids, sizes = ids_of(40), EngineConfig(max_batched_tokens=16)
    wanted = transformers_logits(folder, ids)
    layers = Engine.from_pretrained(folder, config=sizes, quantized_kv=False)
    whole = Engine.from_pretrained(folder, config=sizes)
    assert distance(layers.score(ids.tolist()), wanted) < 0.02
    assert distance(whole.score(ids.tolist()), wanted) < 0.2
    assert (whole.pools[0].k.dtype == layers.pools[0].k.dtype) == (preset == "w4")


def test_beams_and_seeded_samples_are_those_of_the_fast_path(tiny_llama):
    """What requests ask for does not know whose code gives the logits."""
    prompt, found = ids_of(20).tolist(), []
    for code in (True, False):
        engine = engine_of(tiny_llama, transformers_code=code)
        (beams,) = beam_search(engine, [prompt], BeamParams(beam_width=3, max_tokens=6))
        sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
        (output,) = engine.generate([prompt], sampled)
        found.append(([beam.token_ids for beam in beams], output.token_ids))
        engine.check_integrity()
    assert found[0] == found[1]
