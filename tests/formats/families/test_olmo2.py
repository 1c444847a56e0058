"""OLMo 2: norms after the sub-layers, norms of q and k over their whole projection."""

import pytest

from formats.errors import RecipeError
from formats.families.block_layers import SMOOTHING_KINDS, common_inputs, smoothing_groups
from formats.families.registry import family_of
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from tests.ptq.quantizing import make_plan, observed_work


@pytest.fixture(scope="module")
def olmo2(make_model):
    return make_model("olmo2")


def test_what_is_not_smoothed_is_told(olmo2, tmp_path):
    work = observed_work(make_plan(olmo2, tmp_path))
    SmoothQuantSpec().algorithm().prepare(work)
    told = [event.message for event in work.events if event.kind == "smoothing_skipped"]
    assert [message.split()[2] for message in told] == ["attention_input,", "mlp_input,"]


def test_only_what_has_a_source_before_it_is_smoothed():
    names = [f"b.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    family = family_of({"model_type": "olmo2"})
    kinds = {group.kind for group in smoothing_groups(family, "b", names, SMOOTHING_KINDS)}
    assert kinds == {"attention_output", "mlp_output"}
    inputs = common_inputs(family, "b", names)
    assert inputs["b.self_attn.q_proj"] == inputs["b.self_attn.v_proj"] != inputs[names[0]]


def test_the_residual_stream_is_not_rotated(olmo2, tmp_path):
    with pytest.raises(RecipeError, match=r"post_attention_layernorm.*Set residual: false"):
        make_plan(olmo2, tmp_path, "w4", methods=(RotationSpec(), RTNSpec()))
    make_plan(olmo2, tmp_path, "w4", methods=(RotationSpec(residual=False), RTNSpec()))
