"""`layers` of a recipe: what is accepted, what is refused, and what the plan makes of it."""

import pytest

from formats.errors import RecipeError
from formats.scheme import PRESETS
from ptq.plan.describe import describe_plan, explain
from ptq.recipe.reading import load_recipe, resolved_yaml
from tests.ptq.plan.test_plan import plan, problems

DYNAMIC = "int8 weights per_channel, dynamic int8 inputs per_token"
STATIC = "int8 weights per_channel, static int8 inputs per_tensor"
DOWN = "layers: [{match: ['re:.*down_proj'], scheme: a8w8_dynamic}]\n"
GROUPS = "{weights: {dtype: int4, granularity: group, group_size: 128}}"


def layers(*entries: str) -> str:
    return f"layers: [{', '.join(f'{{match: {match}}}' for match in entries)}]\n"


def test_later_entries_go_over_earlier_ones_and_ignore_over_all(tiny_llama, tmp_path):
    extra = layers(
        "['re:.*down_proj', 're:.*o_proj'], scheme: a8w8_dynamic",
        f"['model.layers.0.mlp.down_proj'], scheme: {GROUPS}",
    )
    made = plan(tmp_path, tiny_llama, extra + "ignore: [lm_head, 're:.*1.mlp.down_proj']\n")
    reasons = {module.name: module.reason for module in made.modules}
    assert reasons["model.layers.0.mlp.down_proj"] == "int4 weights group of 128"
    assert reasons["model.layers.1.mlp.down_proj"] == "ignored by 're:.*1.mlp.down_proj'"
    assert reasons["model.layers.1.self_attn.o_proj"] == DYNAMIC
    assert reasons["model.layers.1.mlp.up_proj"] == STATIC
    assert made.schemes["model.layers.0.self_attn.o_proj"] == PRESETS["a8w8_dynamic"].of_layers


def test_the_resolved_recipe_says_the_same_and_nothing_where_there_are_none(tiny_llama, tmp_path):
    made = plan(tmp_path, tiny_llama, DOWN).recipe
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(made))
    assert load_recipe(path) == made
    again = load_recipe(path, ["layers.0.scheme=a8w4"]).layers[0].scheme
    assert again == PRESETS["a8w4"].of_layers.opened
    assert "layers:" not in resolved_yaml(plan(tmp_path, tiny_llama).recipe)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            layers("['re:.*downproj'], scheme: w8"),
            "layers.0.match.0: 're:.*downproj' matches no linear layer; "
            "did you mean 're:.*down_proj'?",
        ),
        (
            layers("[lm_head], scheme: w8"),
            "layers.0.match.0: 'lm_head' matches only layers that stay in float, such as lm_head",
        ),
        (
            layers("['re:.*q_proj', 're:.*1.*up_proj'], scheme: a8w8_dynamic"),
            "layers.0.match: model.layers.0.self_attn.qkv_proj fuses layers that would have "
            f"different schemes (q_proj: {DYNAMIC}; k_proj, v_proj: {STATIC}); match all of them",
        ),
        (
            layers("['re:.*q_proj', 're:.*1.*up_proj'], scheme: a8w8_dynamic"),
            "layers.0.match: model.layers.1.mlp.gate_up_proj fuses layers",
        ),
        (layers("['re:.*'], scheme: a8w8_dynamic"), "layers: leaves no layer to the scheme a8w8c8"),
        (
            layers("[re:.*down_proj], scheme: a8w8c8"),
            "layers.0.scheme.kv_cache: found a cache in the scheme of single layers",
        ),
        (layers("['re:.*down_proj'], scheme: a9"), "layers.0.scheme: unknown scheme 'a9'"),
        (
            layers("['re:.*down_proj'], scheme: {}"),
            "layers.0.scheme: quantizes no weights; give weights",
        ),
        (layers("[], scheme: w8"), "layers.0.match: found an empty list; needed is"),
        (layers("['re:(']"), "layers.0.match.0: 're:(' is not a regular expression"),
        (
            layers("['re:.*down_proj'], weights: {dtype: int8}"),
            "layers.0.weights: unknown key; allowed: match, scheme",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(extra, message, tiny_llama, tmp_path):
    assert any(message in line for line in problems(tmp_path, tiny_llama, extra)), problems(
        tmp_path, tiny_llama, extra
    )


def test_groups_that_do_not_divide_are_told_at_the_entry(make_model, tmp_path):
    model = make_model("llama", intermediate_size=192)
    (line,) = problems(tmp_path, model, layers(f"['re:.*0.mlp.down_proj'], scheme: {GROUPS}"))
    assert line.startswith("r.yaml:6: layers.0.scheme.weights.group_size: 128 does not divide")


@pytest.mark.parametrize(
    ("scheme", "of_down", "methods", "message"),
    [
        ("c8", "w8", "[]", "the scheme c8 quantizes no weights, of which layers could differ"),
        ("w8", "a8w8", "[clip, rtn]", None),
        ("w8", "w4", "[clip, rtn]", "clip chooses ranges of static inputs"),
        ("fp8_channel", "w4", "[rtn, refine]", None),
        ("fp8_channel", "fp8_tensor", "[rtn, refine]", "refine moves integers"),
        ("w8", "a8w8", "[shift, rtn]", None),
        ("w8", "w4", "[shift, rtn]", "leaves activations and the cache in floating point"),
    ],
)
def test_methods_must_fit_some_layer(scheme, of_down, methods, message, tiny_llama, tmp_path):
    changes = [f"scheme={scheme}", f"layers.0.scheme={of_down}", f"methods={methods}"]
    if message is None:
        assert plan(tmp_path, tiny_llama, DOWN, *changes).recipe.layers
    else:
        with pytest.raises(RecipeError, match=message):
            plan(tmp_path, tiny_llama, DOWN, *changes)


def test_check_and_explain_tell_the_scheme_of_each_layer(tiny_llama, tmp_path):
    made = plan(tmp_path, tiny_llama, DOWN)
    lines = list(describe_plan(made, {}))
    assert "scheme       a8w8c8, but for 2 of 14 quantized layers" in lines
    (down,) = (line for line in lines if "down_proj" in line)
    assert down.endswith(f"quantize  {DYNAMIC}")
    steps = "\n".join(explain(made, "0.mlp.down_proj"))
    assert f"stored as {DYNAMIC}" in steps
    assert "input scale by" not in steps
    assert "input scale by absmax" in "\n".join(explain(made, "0.mlp.up_proj"))
