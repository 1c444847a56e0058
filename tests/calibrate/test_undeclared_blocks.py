"""Blocks of models that no family declares, and of old ones, run as transformers runs them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.modeling.layers import structure_of
from tests.calibrate.test_stream import open_stream
from tests.families import distance
from tests.older_families import OLDER, write_older
from tests.ptq.quantizing import random_tokens
from tests.undeclared import UNDECLARED

ODD = {  # what attention may be asked for, and embeddings of several kinds
    "gemma2": {"sliding_window": 16, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 16, "intermediate_size": 64},
    "deepseek_v3": {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32}
    | {"qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "gpt2": {"n_inner": 256},
    "biogpt": {},
    "granite": {"embedding_multiplier": 3.0},
    "modernbert-decoder": {"global_attn_every_n_layers": 2, "local_attention": 16},
}


def run_blocks(folder, ids):
    """Hidden states after the last block, by the stream and by transformers."""
    stream = open_stream(folder, [ids])
    for index in range(len(stream.blocks)):
        stream.advance(stream.load(index))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole = []
    last = model.get_submodule(structure_of(Checkpoint.open(folder).config).list)[-1]
    last.register_forward_hook(lambda _, __, out: whole.append(out))
    with torch.no_grad():
        model(ids[None])
    out = whole[0][0] if isinstance(whole[0], tuple) else whole[0]
    return stream.inputs[0], out[0]


@pytest.mark.parametrize("kind", UNDECLARED)
def test_blocks_are_those_of_transformers(make_model, kind):
    found, wanted = run_blocks(make_model(kind, **UNDECLARED[kind]), random_tokens().sequences()[1])
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("kind", ODD)
def test_attention_and_embeddings_of_all_kinds(make_model, monkeypatch, kind):
    """As if nothing were declared, whether it is or not."""
    monkeypatch.setattr("formats.families.registry.BY_TYPE", {})
    found, wanted = run_blocks(make_model(kind, **ODD[kind]), random_tokens().sequences()[1])
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("name", OLDER)
def test_blocks_of_older_families_are_those_of_transformers(tmp_path, name):
    ids, seen = random_tokens().sequences()[1], []
    stream = open_stream(write_older(tmp_path, name), [ids])
    structure = structure_of(Checkpoint.open(tmp_path).config)
    for index in range(len(stream.blocks)):
        block = stream.load(index)
        block.run(0, on_kv=lambda k, v: seen.append((tuple(k.shape), tuple(v.shape))))
        stream.advance(block)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    norm, site = model.get_submodule(structure.norm), structure.blocks[0].attention
    with torch.no_grad():
        found = model.get_output_embeddings()(norm(stream.inputs[0]))
        assert distance(found, model(ids[None]).logits[0]) < 1e-4
    shape = (len(ids), site.kv_heads)
    assert seen == [((*shape, site.key_size), (*shape, site.value_size))] * 2
