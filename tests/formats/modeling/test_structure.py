"""What is found of models that no family declares, and what is refused by name."""

import pytest
from transformers import AutoConfig

from formats.errors import CheckpointError
from formats.modeling.config import transformers_config
from formats.modeling.layers import (
    attention_names,
    block_names,
    cached,
    embedding_name,
    head_name,
    structure_of,
)
from tests.gemma4 import LAYOUTS, TEXT
from tests.tiny_models import tiny_config
from tests.undeclared import UNDECLARED

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LIKE_LLAMA = ("apertus", "arcee", "cohere2", "ernie4_5", "helium", "nanochat", "phi", "seed_oss")
LIKE_LLAMA += ("stablelm", "starcoder2")
MANY = {  # list of blocks, embedding, head, heads of K and V with their sizes
    **dict.fromkeys(LIKE_LLAMA, ("model.layers", "model.embed_tokens", "lm_head", (2, 16, 16))),
    "biogpt": ("biogpt.layers", "biogpt.embed_tokens", "output_projection", (4, 16, 16)),
    "gpt2": ("transformer.h", "transformer.wte", "lm_head", (4, 16, 16)),
    "gpt_neox": ("gpt_neox.layers", "gpt_neox.embed_in", "embed_out", (4, 16, 16)),
    "persimmon": ("model.layers", "model.embed_tokens", "lm_head", (4, 16, 16)),
}
REFUSED = {
    "bert": "'bert' is not supported: its tokens see later ones: it is an encoder",
    "bart": "'bart' is not supported: it is an encoder and a decoder",
    "t5": "'t5' is not supported: it is an encoder and a decoder",
    "recurrent_gemma": "'recurrent_gemma' is not supported: its blocks keep another state",
    "rwkv": "'rwkv' is not supported: its attention does not go through",
    "ctrl_": "transformers takes it for none",
}


def config_of(kind, **more):
    return AutoConfig.for_model(kind, **SIZES | more).to_dict()


def blocks_of(kind, **more):
    return structure_of(config_of(kind, **more)).blocks


@pytest.mark.parametrize("kind", MANY)
def test_blocks_embedding_head_and_cache_are_found(kind):
    config, (blocks, embedding, head, sizes) = config_of(kind), MANY[kind]
    assert block_names(config) == (f"{blocks}.0", f"{blocks}.1")
    assert (embedding_name(config), head_name(config)) == (embedding, head)
    assert [(own.heads, own.k, own.v) for own in cached(config)] == [sizes, sizes]
    assert all(name.startswith(blocks) for name in attention_names(config))
    assert structure_of(config) is structure_of(config)


def test_windows_bounds_and_sinks_are_told_by_layer():
    sites = [block.attention for block in blocks_of("vaultgemma", sliding_window=8)]
    assert [site.window for site in sites] == [8, None]
    assert [site.arguments for site in sites] == [("softcap",)] * 2
    with_sinks = blocks_of("granite_swa", sliding_window=8)
    assert {block.attention.arguments for block in with_sinks} == {("s_aux",)}


def test_chunks_are_told_by_layer():
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 128}
    blocks = blocks_of("llama4_text", **kinds, attention_chunk_size=8)
    sites = [(x.window, x.reach, x.arguments) for x in (block.attention for block in blocks)]
    assert sites == [(None, 8, ()), (None, None, ())]


def test_code_that_looks_at_data_is_read_on_zeros():
    """Its experts stay whole, as their code is none that is known."""
    config = tiny_config("dbrx").to_dict()
    (block, _) = structure_of(config).blocks
    attention = f"{block.name}.norm_attn_norm.attn"
    assert block.linears == (f"{attention}.Wqkv", f"{attention}.out_proj")
    assert block.attention.output == f"{attention}.out_proj"
    assert block.narrow == (f"{block.name}.ffn.router.layer",)


def test_a_state_without_a_convolution_is_found():
    first, second = structure_of(tiny_config("minimax").to_dict()).blocks
    assert (first.attention is None, first.mixers) == (False, ())
    assert (second.attention, second.mixers) == (None, ("model.layers.1.self_attn",))


def test_who_reads_what_is_found():
    (block, _) = blocks_of("cohere2")
    norm = f"{block.name}.input_layernorm"
    readers = [name.rpartition(".")[2] for name, read in block.inputs.items() if read == norm]
    assert readers == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    assert block.attention.value == f"{block.name}.self_attn.v_proj"
    assert block.attention.output == f"{block.name}.self_attn.o_proj"


def test_experts_have_the_names_of_the_files():
    (block, _) = blocks_of("phimoe", **UNDECLARED["phimoe"])
    experts = [name for name in block.linears if ".experts." in name]
    assert len(experts) == 12
    assert f"{block.name}.block_sparse_moe.experts.3.w2" in experts
    assert block.routers == (f"{block.name}.block_sparse_moe.gate",)
    assert len({block.inputs[name] for name in experts if not name.endswith("w2")}) == 1


def test_stacks_of_other_code_stay_whole():
    """Aria's hold inputs before outputs."""
    (block, _) = blocks_of("aria_text", moe_num_experts=4, moe_topk=2)
    assert block.whole == (f"{block.name}.mlp.experts",)
    assert not any(".experts." in name for name in block.linears)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_causal_decoder_is_refused_by_name(kind):
    known = kind != "ctrl_"
    config = AutoConfig.for_model(kind).to_dict() if known else {"model_type": kind}
    with pytest.raises(CheckpointError, match=REFUSED[kind]):
        structure_of(config)


def test_blocks_with_a_state_have_mixers_and_attention_or_either():
    kinds = ["linear_attention", "full_attention"]
    config = config_of("qwen3_next", **FEW, layer_types=kinds)
    first, second = structure_of(config).blocks
    assert (first.attention, second.mixers) == (None, ())
    assert first.mixers == ("model.layers.0.linear_attn",)
    assert f"{first.name}.linear_attn.in_proj_qkvz" in first.linears
    assert attention_names(config) == ("model.layers.1.self_attn",)
    assert len(cached(config)) == 1
    (block, _) = blocks_of("falcon_h1")
    assert block.attention is not None
    assert block.mixers == ("model.layers.0.mamba",)


def test_as_many_experts_as_channels_are_taken_apart():
    """As those of Qwen3-Next-80B-A3B: 512 of 512."""
    alike = FEW | {"num_experts": 32, "layer_types": ["linear_attention", "full_attention"]}
    block, _ = blocks_of("qwen3_next", **alike)
    assert f"{block.name}.mlp.experts.31.down_proj" in block.linears


def test_layers_that_steer_a_mixer_stay_in_float():
    sizes = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    sizes |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention"] * 2}
    (block, _) = blocks_of("qwen3_next", **FEW, **sizes)
    assert block.narrow == (f"{block.name}.linear_attn.in_proj_ba",)
    assert block.narrow[0] not in block.linears


def test_infinity_is_read_as_transformers_writes_it():
    told = config_of("bamba") | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert transformers_config(told).time_step_limit[1] == float("inf")


def test_code_of_its_own_is_never_run():
    with pytest.raises(CheckpointError, match=r"code of its own \(auto_map\), which is never run"):
        structure_of({"model_type": "opt", "auto_map": {"AutoModelForCausalLM": "code.Model"}})


def test_who_lends_keys_and_values_to_whom_is_found():
    blocks = blocks_of("gemma4_text", **TEXT | LAYOUTS["shared"])
    names = [f"model.layers.{i}.self_attn" for i in range(4)]
    assert [block.attention.module for block in blocks] == names
    assert [block.attention.lender for block in blocks] == [None, None, *names[:2]]
    assert [block.lends for block in blocks] == ["sliding_attention", "full_attention", None, None]
    assert [block.attention.key_size for block in blocks] == [32, 64, 32, 64]


def test_experts_in_parameters_of_all_are_layers():
    structure = structure_of(config_of("gemma4_text", **TEXT | LAYOUTS["experts"]))
    stack = "model.layers.0.experts"
    assert structure.stacks[f"{stack}.gate_up_proj"][:3] == (
        f"{stack}.0.gate_proj.weight",
        f"{stack}.0.up_proj.weight",
        f"{stack}.1.gate_proj.weight",
    )
    assert f"{stack}.3.down_proj" in structure.quantizable
    renamed = config_of("granitemoe", num_local_experts=4)
    assert "model.layers.1.block_sparse_moe.input_linear.weight" in structure_of(renamed).stacks
    assert structure.routers == {f"model.layers.{i}.router.proj" for i in (0, 1)}
