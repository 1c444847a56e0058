"""Sizes that 128 does not divide: each layer has the largest groups that fit it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.scheme import GROUP_SIZES, WeightSpec
from inference.engine import Engine
from ptq.methods.costs import fits
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.reuse import solve_notes
from ptq.plan.describe import describe_plan
from ptq.plan.plan import Plan, plan_recipe
from ptq.recipe.own_model import shipped_paths
from ptq.recipe.reading import load_recipe, read_recipe, resolved_yaml
from ptq.report.inspection import inspect
from ptq.search.costs import candidates
from tests.ptq.plan.test_layer_schemes import logits, reference, usual_distance
from tests.ptq.quantizing import edit_config, executed, write_header

SIZES = {  # hidden, intermediate, query heads, KV heads, of a size
    "SmolLM2 135M": (576, 1536, 9, 3, 64),
    "SmolLM2 360M": (960, 2560, 15, 5, 64),
    "Gemma 3 270M": (640, 2048, 4, 1, 256),
    "gpt-oss": (2880, 2880, 64, 8, 64),
    "32 divides nothing of it": (96, 176, 3, 1, 32),
}


@pytest.fixture(scope="module")
def sized(make_model, tmp_path_factory) -> Callable[[str], Path]:
    """Llamas of a block in some sizes, without their weights' bytes."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp("sized")
            shutil.copytree(make_model("llama"), folder, dirs_exist_ok=True)
            keys = ("hidden_size", "intermediate_size", "num_attention_heads")
            keys += ("num_key_value_heads", "head_dim")
            sizes = dict(zip(keys, SIZES[name], strict=True))
            write_header(edit_config(folder, **sizes, num_hidden_layers=1))
        return made[name]

    return make


def planned(
    model: Path, recipe: str | Path, folder: Path, *settings: str, force: bool = False
) -> Plan:
    output = f"output.path={folder / 'out'}"
    lengths = [f"dataset.{kind}.sequence_length=64" for kind in ("calibration", "evaluation")]
    own = [f"model.path={model}", output, "report.speed=false", "report.peers=[]", *lengths]
    return plan_recipe(read_recipe(recipe, [*own, *settings]), force=force)


def group_sizes(made: Plan) -> set[object]:
    return {scheme.weights and scheme.weights.group_size for scheme in made.schemes.values()}


def largest(spec: WeightSpec, inputs: int) -> int | None:
    return max((size for size in GROUP_SIZES[spec.dtype] if inputs % size == 0), default=None)


@pytest.mark.parametrize("name", shipped_paths())
def test_every_shipped_recipe_fits_every_size(name, sized, tmp_path):
    """The recipe that the plan names says so itself, and says the same when it is read again."""
    for size, (hidden, inner, *_) in SIZES.items():
        if name == "w8_gptq" and (hidden % 32 or inner % 32):  # its groups are of 32 everywhere
            with pytest.raises(RecipeError, match=r"32 does not divide .* auto takes what fits"):
                planned(sized(size), name, tmp_path)
            continue
        made = planned(sized(size), name, tmp_path)
        shapes = {module.name: module.shape for module in made.modules}
        for layer, scheme in made.schemes.items():
            spec, inputs = scheme.weights, shapes[layer][1]
            assert spec is not None
            if spec.granularity == "group":
                own = {"w8_gptq": 32}.get(name, largest(spec, inputs))
                assert spec.group_size == own or spec.format_name == "nvfp4"
            elif spec.dtype == "int4":
                assert largest(WeightSpec(dtype="int4"), inputs) is None
        text = resolved_yaml(made.recipe)
        assert "auto" not in text.partition("scheme:")[2].partition("observers:")[0]
        if made.recipe.budget is None:
            (tmp_path / "resolved.yaml").write_text(text)
            again = planned(sized(size), tmp_path / "resolved.yaml", tmp_path)
            assert (again.recipe, again.schemes) == (made.recipe, made.schemes)
            assert again.modules == made.modules


def test_the_plan_tells_once_which_layers_have_smaller_groups_and_what_they_cost(sized, tmp_path):
    """Scales are bf16: 9 instead of 5 of each of 4608 rows; one of 96 rows instead of two."""
    of_64 = planned(sized("SmolLM2 135M"), "w4_gptq", tmp_path)
    assert of_64.groups == (
        "groups of 64 in 6 of 7 layers, whose 576 inputs 128 does not divide: "
        f"{4608 * 4 * 2 / 1e3:.1f} kB more than in groups of 128",
    )
    lines = list(describe_plan(of_64, {}))
    assert [line for line in lines if "128 does not divide" in line] == [f"  {of_64.groups[0]}"]
    assert lines[1] == "scheme       w4_g64, but for 1 of 7 quantized layers"
    whole = planned(sized("Gemma 3 270M"), "w4_gptq", tmp_path)
    assert (whole.groups, whole.recipe.layers) == ((), ())
    assert whole.recipe.scheme.wac == "w4"
    odd = planned(sized("32 divides nothing of it"), "a8w4_two_level", tmp_path)
    assert odd.groups[1] == (
        "a scale for each output channel in 1 of 7 layers, whose 176 inputs are no whole groups of "
        "32, 64 or 128, the only ones that all readers take: 192 B less than in groups of 128"
    )
    (scheme,) = {s.text for name, s in odd.schemes.items() if "down_proj" in name}
    assert scheme == "int4 weights per_channel, dynamic int8 inputs per_token"
    (line,) = planned(sized("32 divides nothing of it"), "mxfp4", tmp_path).groups
    assert line.startswith("groups of 16 (nvfp4) in 1 of 7 layers, whose 176 inputs 32 does not ")
    (line,) = planned(sized("gpt-oss"), "fp8_block", tmp_path).groups
    assert line.startswith("blocks are cut where weights end in 7 of 7 layers: 128 does not divide")


def test_a_size_that_a_person_gives_is_held_or_refused(sized, tmp_path):
    model = sized("SmolLM2 135M")
    with pytest.raises(RecipeError, match="128 does not divide the inputs of 6 of 7 layers") as e:
        planned(model, "w4_gptq", tmp_path, "scheme.weights.group_size=128")
    assert str(e.value).endswith("; 32 and 64 divide all inputs: auto takes what fits each layer")
    held = planned(model, "w4_gptq", tmp_path, "scheme.weights.group_size=32")
    assert (held.groups, held.recipe.layers) == ((), ())
    given = tmp_path / "given.yaml"
    for size in ("", "group_size: auto, "):
        weights = f"{{dtype: int4, granularity: group, {size}symmetric: false}}"
        given.write_text(f"base: w4_hqq\nscheme: {{weights: {weights}}}\n")
        assert group_sizes(planned(model, given, tmp_path)) == {64, 128}
    given.write_text("base: w4_hqq\nscheme: {weights: {group_size: 128}}\n")
    with pytest.raises(RecipeError, match=r"given\.yaml:2: scheme\.weights\.group_size: 128 does"):
        planned(model, given, tmp_path)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (("scheme=w4",), {64, 128}),
        (("scheme=w4", "scheme.weights.group_size=32"), {32}),
        (("scheme.weights.granularity=group",), {64, 128}),
        (("scheme=w4", "scheme.weights.granularity=per_channel"), {None}),
        (("scheme=mxfp4",), {32}),
    ],
)
def test_overrides_keep_to_sizes_that_fit(settings, sizes, sized, tmp_path):
    made = planned(sized("SmolLM2 135M"), "w8_rtn", tmp_path, *settings)
    assert group_sizes(made) == sizes


def test_layers_of_their_own_are_settled_too_and_the_last_entry_still_wins(sized, tmp_path):
    given = tmp_path / "given.yaml"
    given.write_text(
        "base: w8_rtn\nlayers:\n"
        "  - {match: ['re:.*(o|down)_proj'], scheme: w4}\n"
        "  - {match: ['re:.*down_proj'], scheme: a8w4}\n"
    )
    made = planned(sized("32 divides nothing of it"), given, tmp_path)
    found = {name.rpartition(".")[2]: scheme.text for name, scheme in made.schemes.items()}
    assert found["q_proj"] == "int8 weights per_channel"
    assert found["o_proj"] == "int4 weights group of 32"
    assert found["down_proj"] == "int4 weights per_channel, dynamic int8 inputs per_token"
    assert {
        module.name: module.reason for module in made.modules if module.action == "quantize"
    } == {name: scheme.text for name, scheme in made.schemes.items()}


def test_floats_of_four_bits_have_groups_of_16_at_least(make_model, tmp_path):
    model = make_model("llama", intermediate_size=168)
    with pytest.raises(RecipeError, match="16 does not divide the inputs of 2 of 2 layers") as e:
        planned(model, "mxfp4", tmp_path)
    assert "add 're:.*down_proj' to ignore" in str(e.value)


@pytest.mark.parametrize("recipe", ["w4_rtn", "w4_gptq", "a8w4_two_level", "mxfp8"])
def test_a_model_that_32_does_not_divide_runs_as_its_dequantized_weights_do(
    recipe, make_model, tmp_path
):
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    odd = dict(zip((*keys, "head_dim"), SIZES["32 divides nothing of it"], strict=True))
    model = make_model("llama", **odd)
    made = planned(model, recipe, tmp_path)
    executed(made)
    checkpoint = Checkpoint.open(tmp_path / "out" / "checkpoint", verify=True)
    assert {name: checkpoint.scheme_of(name) for name in made.schemes} == made.schemes
    weights = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    assert made.prediction.checkpoint_bytes == pytest.approx(weights, rel=0.05)
    config = json.loads((checkpoint.path / "config.json").read_text())["quantization_config"]
    groups = {name: scheme for name, scheme in made.schemes.items() if "down_proj" in name}
    of_down = [g for g in config["config_groups"].values() if "down" in str(g["targets"])]
    assert [g["weights"]["strategy"] for g in of_down] == ["channel"]
    assert "group_size" not in of_down[0]["weights"]
    found = inspect(checkpoint)
    assert found.layers == {s.text: tuple(groups) for s in groups.values()}
    engine, exact = Engine.from_pretrained(checkpoint.path), reference(model, checkpoint)
    assert usual_distance(engine, exact) < 2e-4
    if recipe.startswith("w4"):
        pytest.importorskip("compressed_tensors")
        opened = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
        ids = torch.arange(320, 328)
        torch.testing.assert_close(logits(opened, ids), logits(exact, ids), rtol=1e-3, atol=1e-3)


def test_solving_in_another_scheme_tells_that_layers_keep_theirs(make_model, tmp_path):
    model = make_model("llama", intermediate_size=192)
    executed(planned(model, "w4_rtn", tmp_path))
    checkpoint = Checkpoint.open(tmp_path / "out" / "checkpoint")
    with pytest.raises(CheckpointError, match=r"with `--set 'layers=\[\]' --set .*size=64`"):
        checkpoint.require_one_scheme("gptq")
    seen, run = Artifact.load(tmp_path / "out"), tmp_path / "run.yaml"
    run.write_text(resolved_yaml(planned(model, "w4_rtn", tmp_path, force=True).recipe))
    assert list(solve_notes(seen, load_recipe(run))) == []
    changed = "scheme=a8w4"
    (note,) = solve_notes(seen, planned(model, run, tmp_path, changed, force=True).recipe)
    assert "keep what they had in that run (int4 weights group of 64)" in note
    whole = planned(model, run, tmp_path, changed, "layers=[]", force=True)
    assert list(solve_notes(seen, whole.recipe)) == []
    assert {scheme.activations is None for scheme in whole.schemes.values()} == {False}
    advised = planned(model, run, tmp_path, "layers=[]", "scheme.weights.group_size=64", force=True)
    assert len(set(advised.schemes.values())) == 1


@pytest.mark.parametrize(
    ("inputs", "fitting"),
    [
        (256, ["w4", "w4_g64", "w4_g32", "w8"]),
        (576, ["w4_g64", "w4_g32", "w8"]),
        (176, ["w4_per_channel", "w8"]),
    ],
)
def test_a_budget_chooses_among_what_fits_a_layer(inputs, fitting):
    schemes = candidates(load_recipe("budget").scheme, "cpu")
    weight = torch.zeros(8, inputs)
    assert [name for name, scheme in schemes.items() if fits(scheme, weight)] == fitting
