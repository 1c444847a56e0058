"""Models that no family declares: what is smoothed, what is written, what is refused."""

import pytest

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import ShiftSpec
from ptq.plan.describe import describe_plan
from tests.conftest import write_random
from tests.families import check_quantized
from tests.mixtures import check_quantized_experts
from tests.ptq.quantizing import make_plan
from tests.tiny_models import tiny_config
from tests.undeclared import UNDECLARED

PARALLEL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
FOUND = {  # source: some of its consumers
    "cohere2": {"input_layernorm": PARALLEL, "mlp.up_proj": ("mlp.down_proj",)},
    "opt": {"final_layer_norm": ("fc1",), "fc1": ("fc2",)},  # relu lets positive factors through
    "starcoder2": {"post_attention_layernorm": ("mlp.c_fc",)},  # GELU does not
    "gpt_neox": {"post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    "ernie4_5_moe": {"post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
}


def test_every_recipe_and_a_report_of_what_is_left(make_model, tmp_path):
    folder = make_model("starcoder2", **UNDECLARED["starcoder2"])
    lines = list(describe_plan(make_plan(folder, tmp_path / "out"), {}))
    assert "  found on the blocks: self_attn.v_proj -> self_attn.o_proj" in lines
    assert "  left alone: mlp.c_proj: mlp_output (no factor moves into it)" in lines


def test_weights_of_no_linear_layer_are_told(tmp_path):
    folder = write_random(tmp_path / "model", tiny_config("dbrx"))
    lines = list(describe_plan(make_plan(folder, tmp_path / "out", "w4", methods=(RTNSpec(),)), {}))
    stacks = "of the parameters are of no linear layer of a block, and stay in float"
    assert f"  67% {stacks}" in lines


@pytest.mark.parametrize("kind", FOUND)
def test_smoothing_groups_are_found_on_the_block(make_model, tmp_path, kind):
    plan = make_plan(make_model(kind, **UNDECLARED[kind]), tmp_path / "out")
    place = plan.blocks[0] + "."
    found = {
        group.source.removeprefix(place): [n.removeprefix(place) for n in group.consumers]
        for group in plan.smoothing
        if group.block == plan.blocks[0]
    }
    for source, consumers in FOUND[kind].items():
        assert set(consumers) <= set(found[source])


def test_experts_and_their_router_are_smoothed_together(make_model, tmp_path):
    folder = make_model("ernie4_5_moe", **UNDECLARED["ernie4_5_moe"])
    groups = make_plan(folder, tmp_path / "out").smoothing
    shared = next(g for g in groups if g.kind == "mlp_input" and ".1." in g.source)
    assert shared.routers == ("model.layers.1.mlp.gate",)
    assert len(shared.consumers) == 10  # gate and up of four experts and of the shared one
    tied = {g.tied for g in groups if g.kind == "mlp_output" and ".experts." in g.source}
    assert len(tied) == 1


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("cohere2", "a8w8c8"),
        ("starcoder2", "w4"),
        ("gpt_neox", "a8w8c8"),
        ("opt", "fp8_channel"),
        ("stablelm", "w4"),
    ],
)
def test_checkpoints_open_here_and_in_transformers(make_model, tmp_path, kind, preset):
    checkpoint = check_quantized(make_model(kind, **UNDECLARED[kind]), tmp_path / "out", preset)
    assert len(checkpoint.kv_scales) == (2 if preset == "a8w8c8" else 0)


@pytest.mark.parametrize(("kind", "preset"), [("olmoe", "a8w8c8"), ("phimoe", "fp8_channel")])
def test_mixtures_are_written_expert_by_expert(make_model, tmp_path, kind, preset):
    folder = make_model(kind, **UNDECLARED[kind])
    checkpoint = check_quantized_experts(folder, tmp_path / "out", preset)
    assert any(".experts.3." in name for name in checkpoint.quantized_modules)
    assert isinstance(checkpoint, Checkpoint)


@pytest.mark.parametrize("method", [RotationSpec(), ShiftSpec()])
def test_methods_that_need_a_declaration_are_refused(make_model, tmp_path, method):
    folder = make_model("opt", **UNDECLARED["opt"])
    with pytest.raises(RecipeError, match=f"{method.name} must know what each layer is.*'opt'"):
        make_plan(folder, tmp_path / "out", methods=(method, RTNSpec()))
