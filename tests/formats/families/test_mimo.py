"""MiMo: Qwen2 by another name, which transformers has not, beside a layer that is no block."""

import json

import pytest

from formats.checkpoint.read import Checkpoint
from formats.families.registry import predicting_layer, predicting_patterns
from tests.families import (
    but_one_in_ci,
    check_blocks,
    check_engine,
    check_quantized,
    distance,
    transformers_logits,
)
from tests.ptq.quantizing import edit_model, random_tokens


@pytest.fixture(scope="module")
def mimo(make_model):
    return make_model("mimo", num_nextn_predict_layers=1)


def test_logits_and_blocks_are_those_of_qwen2(mimo, tmp_path):
    ids = random_tokens(1, 60).ids[0].clamp(min=1)
    engine = check_engine(mimo, ids)
    check_blocks(mimo)
    same = edit_model(mimo, tmp_path / "qwen2", model_type="qwen2")
    assert distance(engine.score(ids.tolist()), transformers_logits(same, ids)) < 1e-4


@pytest.mark.parametrize("preset", but_one_in_ci("w4", ["a8w8c8", "w4"]))
def test_quantized_checkpoints_run(mimo, tmp_path, preset):
    check_quantized(mimo, tmp_path, preset)


def test_what_others_need_of_the_configuration_is_kept(mimo, tmp_path):
    """Others have no class of it without its authors' code, which is never run here."""
    code = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    own = edit_model(mimo, tmp_path / "own", auto_map=code)
    config = json.loads((own / "config.json").read_text())
    check_engine(own, random_tokens(1, 20).ids[0].clamp(min=1))
    found = check_quantized(own, tmp_path / "out", "w4", opens=False)
    written = json.loads((found.path / "config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert found.only_here is None


CONFIGS = {
    kind: {"model_type": kind, "num_hidden_layers": 2}
    for kind in ("deepseek_v3", "mimo", "qwen2", "qwen3_next")
}


@pytest.mark.parametrize(
    ("kind", "name", "layer"),
    [
        ("deepseek_v3", "model.layers.2.shared_head.norm.weight", "model.layers.2"),
        ("deepseek_v3", "model.layers.10.mlp.experts.3.up_proj", "model.layers.10"),
        ("deepseek_v3", "model.layers.1.mlp.gate.weight", None),
        ("deepseek_v3", "model.norm.weight", None),
        ("mimo", "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0"),
        ("mimo", "model.layers.2.self_attn.q_proj", None),
        ("qwen2", "model.layers.2.self_attn.q_proj", None),
        ("qwen3_next", "mtp.fc.weight", "mtp"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_proj.weight", "mtp"),
        ("qwen3_next", "model.layers.2.eh_proj.weight", "model.layers.2"),
        ("qwen3_next", "model.layers.1.mlp.gate.weight", None),
    ],
)
def test_names_tell_the_layer_for_further_tokens(kind, name, layer):
    assert predicting_layer(CONFIGS[kind], name) == layer


def test_patterns_mean_all_that_is_in_it():
    names = ["model.mtp_layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    patterns = predicting_patterns(CONFIGS["mimo"], names)
    assert patterns == [r"re:model\.layers\.2\.", r"re:model\.mtp_layers\.0\."]
    assert predicting_patterns(CONFIGS["mimo"], names[1:]) == []
    assert predicting_patterns(CONFIGS["qwen3_next"], ["mtp.fc.weight"]) == [r"re:mtp\."]


def test_a_checkpoint_that_lost_the_layer_opens(mimo):
    assert Checkpoint.open(mimo).predicting_layers == ()
