"""What a plan makes of the layers that predict further tokens."""

import pytest

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.scheme import PRESETS
from ptq.methods.rtn import RTNSpec
from ptq.methods.two_sided import TwoSidedSpec
from ptq.plan.describe import describe_plan, explain
from ptq.search.costs import groups_of
from tests.inference.speculate.methods.test_mtp_quantized import write_predicting
from tests.inference.speculate.methods.test_mtp_states import write_knowing
from tests.inference.transformers_code.test_states import write_small
from tests.ptq.quantizing import edit_model, executed, make_plan

LAYER = "model.mtp_layers.0"


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory):
    plain = make_model("mimo", num_nextn_predict_layers=1, tie_word_embeddings=False)
    out = tmp_path_factory.mktemp("mimo") / "model"
    return edit_model(plain, out, lambda tensors: write_predicting(tensors, "mimo"))


def fates(plan):
    """Action and reason of each linear layer of the first such layer, by its name there."""
    inside = f"{LAYER}."
    return {
        module.name.removeprefix(inside): (module.action, module.reason)
        for module in plan.modules
        if module.name.startswith(inside)
    }


def test_a_plan_tells_what_happens_with_each_of_its_layers(model, tmp_path):
    plan = make_plan(model, tmp_path / "out", "a8w8c8")
    found = fates(plan)
    rounded = "int8 weights per_channel, dynamic int8 inputs per_token, to the nearest: of a layer"
    assert found["self_attn.q_proj"][0] == "quantize"
    assert found["self_attn.q_proj"][1].startswith(rounded)
    around = "around the block of a layer that predicts further tokens"
    assert found["input_proj"] == ("float", around)
    assert plan.schemes[f"{LAYER}.mlp.down_proj"] == PRESETS["a8w8_dynamic"].of_layers
    assert plan.schemes["model.layers.0.mlp.down_proj"] == PRESETS["a8w8"].of_layers
    lines = "\n".join(describe_plan(plan, {}))
    assert rounded in lines
    told = list(explain(plan, f"{LAYER}.mlp.down_proj"))
    assert len(told) == 2
    assert f"stored as {rounded}" in told[1]
    assert not any(label.startswith(LAYER) for label in groups_of(plan))


def test_a_recipe_leaves_it_alone_or_gives_it_a_scheme_of_its_own(model, tmp_path):
    ignore = ("lm_head", r"re:model\.mtp_layers\.")
    plan = make_plan(model, tmp_path / "kept", "w4", methods=(RTNSpec(),), ignore=ignore)
    found = fates(plan)
    assert {action for action, _ in found.values()} == {"float"}
    assert found["mlp.up_proj"][1] == f"ignored by {ignore[1]!r}"
    assert plan.predicting == ()
    kept = make_plan(model, tmp_path / "cache", "k8v4", methods=())
    assert {action for action, _ in fates(kept).values()} == {"float"}
    half = ("lm_head", rf"re:{LAYER}.self_attn.q_proj")
    with pytest.raises(RecipeError, match=r"fuses k_proj, q_proj, v_proj, but only q_proj is"):
        make_plan(model, tmp_path / "half", "w4", methods=(RTNSpec(),), ignore=half)


def test_schemes_of_its_own_are_read_back(model, tmp_path):
    layers = {r"re:model\.mtp_layers\.": "a8w8_dynamic"}
    plan = make_plan(model, tmp_path / "out", "w4", methods=(RTNSpec(),), layers=layers)
    checkpoint = Checkpoint.open(executed(plan).checkpoint)
    found = {name: checkpoint.scheme_of(name) for name in checkpoint.quantized_modules}
    assert found == plan.schemes
    assert len({scheme.text for scheme in found.values()}) == 2


def test_methods_that_need_gradients_leave_it_to_rounding(model, tmp_path):
    plan = make_plan(model, tmp_path / "out", "w4", methods=(TwoSidedSpec(),))
    result = executed(plan)
    assert {*plan.predicting} <= {*Checkpoint.open(result.checkpoint).quantized_modules}
    told = {entry.module: entry.sqnr_db or 0 for entry in result.scale_table.entries}
    assert all(told[name] > 15 for name in plan.predicting)
    assert not {row.module for row in result.modules} & {*plan.predicting}


def test_of_models_that_nobody_declares_it_is_as_a_block(tmp_path):
    folder = write_knowing(write_small("qwen3_next", tmp_path / "plain"), tmp_path / "model")
    ignore = ("lm_head", "re:.*out_proj")
    plan = make_plan(folder, tmp_path / "out", "w4", methods=(RTNSpec(),), ignore=ignore)
    found = {m.name: m.action for m in plan.modules if m.name.startswith("mtp.")}
    assert found["mtp.layers.0.self_attn.q_proj"] == "quantize"
    assert found["mtp.layers.0.mlp.gate"] == found["mtp.fc"] == "float"
    assert found["mtp.layers.0.mlp.shared_expert_gate"] == "float"
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == 12
    assert set(experts) <= set(plan.predicting)
    kept = (*ignore, r"re:mtp\.")
    plan = make_plan(folder, tmp_path / "kept", "w4", methods=(RTNSpec(),), ignore=kept)
    assert plan.predicting == ()
    assert executed(plan).checkpoint.is_dir()
    written = Checkpoint.open(tmp_path / "kept" / "checkpoint")
    assert r"re:mtp\." in written.ignore
