"""DeepSeek V2, V2-Lite and V3: latent attention, whose cache holds latents, and their mixtures."""

import json

import pytest
import torch
from safetensors.torch import load_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError, RecipeError
from formats.families.block_layers import common_inputs, merged_layers, smoothing_groups
from formats.families.registry import family_of
from formats.scheme import KVCacheSpec, Scheme
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from tests.families import (
    check_blocks,
    check_engine,
    check_quantized,
    distance,
    transformers_logits,
)
from tests.ptq.quantizing import edit_model, make_plan, random_tokens
from tests.tiny_families import DEEPSEEK


@pytest.mark.parametrize("name", DEEPSEEK)
def test_logits_and_blocks_are_those_of_transformers(make_model, name):
    kind, own = DEEPSEEK[name]
    folder = make_model(kind, **own)
    check_engine(folder, random_tokens(1, 70).ids[0].clamp(min=1))
    check_blocks(folder)


@pytest.mark.parametrize(
    ("name", "preset"), [("v3", "a8w8c8"), ("v2", "w4"), ("v2_lite", "fp8_channel")]
)
def test_a_quantized_checkpoint_runs_here_and_in_transformers(make_model, tmp_path, name, preset):
    kind, own = DEEPSEEK[name]
    if preset == "a8w8c8":  # transformers reads no static inputs of experts
        own = own | {"first_k_dense_replace": 2}
    checkpoint = check_quantized(make_model(kind, **own), tmp_path, preset)
    absorbed = checkpoint.scheme_of("model.layers.0.self_attn.kv_b_proj")
    assert absorbed.weights == checkpoint.scheme.weights
    assert absorbed.activations is None


@pytest.fixture(scope="module")
def c8(make_model, tmp_path_factory):
    """V2-Lite with a calibrated cache alone."""
    kind, own = DEEPSEEK["v2_lite"]
    model = make_model(kind, **own)
    plan = make_plan(model, tmp_path_factory.mktemp("c8"), "c8", methods=())
    return quantize_tokens(plan, random_tokens(), progress=False).checkpoint


def test_static_scales_of_the_latent_are_its_channels(c8):
    checkpoint = Checkpoint.open(c8, verify=True)
    k, v = checkpoint.kv_scales["model.layers.0.self_attn"]
    assert (k.shape, v.shape) == ((1,), (1, 128))
    table = checkpoint.scale_table
    rows = [table.get("model.layers.0.self_attn", role) for role in ("k_cache", "v_cache")]
    assert [row and row.granularity for row in rows] == ["per_head", "per_channel"]


def test_int8_latents_change_logits_little(c8):
    ids = random_tokens().sequences()[1].tolist()
    sizes = EngineConfig(max_batched_tokens=16, max_model_len=512)
    engines = [Engine.from_pretrained(c8, config=sizes, quantized_kv=q) for q in (False, True)]
    exact, ours = (engine.score(ids) for engine in engines)
    assert 0 < distance(ours, exact) < 0.02
    assert [e.kv_bytes_per_token for e in engines] == [2 * 4 * (128 + 16), 2 * (128 + 16)]


def test_chunks_and_single_tokens_give_the_same_bits(c8):
    ids = random_tokens().sequences()[1][:70].tolist()
    sizes = [EngineConfig(max_batched_tokens=n, max_model_len=512) for n in (128, 7)]
    whole, steps = (Engine.from_pretrained(c8, config=own).score(ids) for own in sizes)
    assert torch.equal(whole, steps)


def test_shared_and_preempted_blocks_give_the_same_tokens(c8):
    """Blocks of latents are shared by prompts with one start, copied, and computed again."""
    first = random_tokens().sequences()[1][:64].tolist() * 2
    prompts = [[*first[:100], token] for token in (7, 8, 9)] + [first[:40]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    ample = EngineConfig(max_model_len=256, max_batch_size=4, prefix_cache=False)
    scarce = EngineConfig(max_model_len=256, max_batch_size=4, kv_blocks=7)
    tokens = [
        [out.token_ids for out in Engine.from_pretrained(c8, config=own).generate(prompts, params)]
        for own in (ample, scarce)
    ]
    assert tokens[0] == tokens[1]


def test_what_is_published_runs_and_quantizes(make_model, tmp_path):
    """A layer that predicts further tokens, after the last block, is rounded in its block alone."""
    kind, own = DEEPSEEK["v3"]
    model = make_model(kind, **own)
    tensors = load_file(model / "model.safetensors")
    further = {
        name.replace(".1.", ".2.", 1): t.clone() for name, t in tensors.items() if ".1." in name
    }
    further["model.layers.2.eh_proj.weight"] = torch.ones(128, 256).bfloat16()
    folder = edit_model(model, tmp_path / "published", lambda tensors: tensors.update(further))
    config = json.loads((folder / "config.json").read_text())
    rotation = config.pop("rope_parameters") | {"type": "yarn"}
    del config["head_dim"], rotation["rope_type"]
    config |= {"rope_theta": rotation.pop("rope_theta"), "rope_scaling": rotation}
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    ids = random_tokens().sequences()[1]
    engine = Engine.from_pretrained(folder, config=EngineConfig(max_model_len=512))
    assert distance(engine.score(ids.tolist()), transformers_logits(model, ids)) < 1e-4
    plan = make_plan(folder, tmp_path / "out", "w8", methods=(RTNSpec(),))
    quantized = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    written = Checkpoint.open(quantized, verify=True)
    rounded = {f"{name}.weight" for name in written.quantized_modules}
    assert "model.layers.2.self_attn.o_proj.weight" in rounded
    assert "model.layers.2.eh_proj.weight" in (kept := further.keys() - rounded)
    assert all(torch.equal(written.tensor(name), further[name]) for name in kept)


def test_two_sizes_of_what_is_rotated_are_refused(make_model):
    """transformers sizes the rotary embedding by head_dim, which then fits no query."""
    kind, own = DEEPSEEK["v3"]
    with pytest.raises(
        CheckpointError, match=r"head_dim is 32 and qk_rope_head_dim is 16; .* make it 16"
    ):
        Checkpoint.open(make_model(kind, **own | {"head_dim": 32}))


def test_scales_of_latents_are_no_scales_of_keys(c8):
    """transformers' own code makes K and V of the latents before it hands them to attention."""
    sizes = EngineConfig(max_model_len=256, transformers_code=True)
    with pytest.raises(EngineError, match=r"static scales of latents.*without transformers_code"):
        Engine.from_pretrained(c8, config=sizes)
    ids = random_tokens().sequences()[1].tolist()
    engines = [
        Engine.from_pretrained(c8, config=own, quantized_kv=False)
        for own in (sizes, sizes.model_copy(update={"transformers_code": False}))
    ]
    theirs, ours = (engine.score(ids) for engine in engines)
    assert distance(ours, theirs) < 1e-4


def test_latents_have_no_scales_of_tokens(make_model, tmp_path):
    kind, own = DEEPSEEK["v2_lite"]
    scheme = Scheme(kv_cache=KVCacheSpec(granularity="per_token_head"))
    with pytest.raises(RecipeError, match=r"found per_token_head; latents.* use per_head"):
        make_plan(make_model(kind, **own), tmp_path, scheme, methods=())


def test_layers_that_belong_together():
    family = family_of({"model_type": "deepseek_v3"})
    leaves = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    names = [f"b.self_attn.{leaf}" for leaf in leaves]
    q_a, q_b, kv_a, kv_b, _ = names
    joint = "b.self_attn.fused_qkv_a_proj"
    assert merged_layers(family, "b", names) == {q_a: joint, kv_a: joint}
    inputs = common_inputs(family, "b", names)
    assert inputs[q_a] == inputs[kv_a]
    assert not {q_b, kv_b} & inputs.keys()
    groups = smoothing_groups(family, "b", names, ("attention_input", "attention_output"))
    assert {group.source: group.consumers for group in groups} == {
        "b.input_layernorm": (q_a, kv_a),
        "b.self_attn.q_a_layernorm": (q_b,),
    }
