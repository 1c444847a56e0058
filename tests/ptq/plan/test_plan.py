"""The plan of a run, and what is looked for before it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import PTQError, RecipeError
from formats.families.registry import MODEL_TYPES
from ptq.evaluate.comparison import report_devices
from ptq.plan.plan import Plan, SmoothingGroup, build_plan, plan_recipe
from ptq.plan.preflight import header_bytes
from ptq.recipe.reading import load_recipe, read_recipe
from ptq.recipe.schema import Recipe
from tests.ptq.quantizing import edit_config

SIZES = (
    "calibration: {samples: 2, sequence_length: 32}, evaluation: {samples: 2, sequence_length: 32}"
)
RECIPE = """\
model: {{path: {model}}}
dataset: {{{sizes}}}
scheme: a8w8c8
methods: [smoothquant, rtn]
output: {{path: {output}}}
"""


def recipe_file(folder: Path, model: Path, extra: str = "") -> Path:
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(model=model, output=folder / "out", sizes=SIZES) + extra)
    return path


def plan(folder: Path, model: Path, extra: str = "", *overrides: str, force: bool = False) -> Plan:
    loaded = read_recipe(recipe_file(folder, model, extra), overrides)
    return plan_recipe(loaded, force=force)


def problems(folder: Path, model: Path, extra: str = "", *overrides: str) -> list[str]:
    """Lines of the error of a plan, the test's folder taken off."""
    with pytest.raises(PTQError) as caught:
        plan(folder, model, extra, *overrides)
    lines = str(caught.value).replace(f"{folder}/", "").splitlines()
    return [line.strip() for line in lines if "problems with" not in line]


def copy(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_linear_layer_of_every_family_is_planned(family, make_model, tmp_path):
    made = plan(tmp_path, make_model(family))
    assert len(made.modules) == 15
    assert made.blocks == ("model.layers.0", "model.layers.1")
    assert [m.name for m in made.modules if m.action == "float"] == ["lm_head"]
    by_name = {m.name: m for m in made.modules}
    down = by_name["model.layers.1.mlp.down_proj"]
    assert (down.shape, down.fused_group) == ((128, 256), None)
    assert "static int8 inputs per_tensor" in down.reason
    key = by_name["model.layers.0.self_attn.k_proj"]
    assert (key.shape, key.fused_group) == ((64, 128), "model.layers.0.self_attn.qkv_proj")
    assert made.quantized == tuple(name for name in by_name if name != "lm_head")


def test_smoothing_groups_of_a_block(tiny_llama, tmp_path):
    groups = [g for g in plan(tmp_path, tiny_llama).smoothing if g.block == "model.layers.1"]
    base = "model.layers.1."
    assert groups[0] == SmoothingGroup(
        kind="attention_input",
        block="model.layers.1",
        source=base + "input_layernorm",
        consumers=tuple(f"{base}self_attn.{x}_proj" for x in "qkv"),
    )
    assert [(g.source, g.consumers) for g in groups[1:]] == [
        (base + "self_attn.v_proj", (base + "self_attn.o_proj",)),
        (base + "post_attention_layernorm", (base + "mlp.gate_proj", base + "mlp.up_proj")),
        (base + "mlp.up_proj", (base + "mlp.down_proj",)),
    ]


def test_smoothing_follows_the_methods(tiny_llama, tmp_path):
    assert plan(tmp_path, tiny_llama, "", "methods=[rtn]").smoothing == ()
    only = "methods.0.smoothquant={targets: [mlp_output]}"
    assert {g.kind for g in plan(tmp_path, tiny_llama, "", only).smoothing} == {"mlp_output"}


def test_a_cache_only_scheme_leaves_every_layer_in_float(tiny_llama, tmp_path):
    made = plan(tmp_path, tiny_llama, "", "scheme=c8", "methods=[]")
    assert made.quantized == ()
    assert made.modules[0].reason == "scheme c8 quantizes the cache only"
    assert {module.action for module in made.modules} == {"float"}


def test_ignored_layers_stay_in_float_and_so_does_the_head(tiny_llama, tmp_path):
    others = "'re:.*down_proj', model.layers.0.self_attn.o_proj"
    made = plan(tmp_path, tiny_llama, f"ignore: [lm_head, {others}]\n")
    assert "lm_head" in plan(tmp_path, tiny_llama, f"ignore: [{others}]\n").quantized
    kept = {m.name: m.reason for m in made.modules if m.action == "float"}
    assert kept == {
        "lm_head": "ignored by 'lm_head'",
        "model.layers.0.mlp.down_proj": "ignored by 're:.*down_proj'",
        "model.layers.1.mlp.down_proj": "ignored by 're:.*down_proj'",
        "model.layers.0.self_attn.o_proj": "ignored by 'model.layers.0.self_attn.o_proj'",
    }


def test_predicted_bytes_are_those_of_the_tensors_and_of_headers(tiny_llama, tmp_path):
    linears = 4 * 128 * 128 - 2 * 64 * 128 + 3 * 128 * 256  # elements of a block's layers
    channels = 2 * 128 + 2 * 64 + 2 * 256 + 128
    norms, embedding = 2 * (2 * 128 * 2) + 128 * 2, 384 * 128 * 2
    kv = 2 * 2 * 2 * 4  # blocks, K and V, heads, fp32
    expected = 2 * (linears + 4 * (channels + 7)) + norms + embedding + kv
    made = plan(tmp_path, tiny_llama)
    names = [*Checkpoint.open(tiny_llama).names(), *(4 * ["model.layers.0.self_attn.k_cache"])]
    names += [f"{m}.{leaf}" for m in made.quantized for leaf in ("input_scale", "weight_scale")]
    assert made.prediction.checkpoint_bytes == expected + header_bytes(names)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("model.layers.0.mlp.dwon_proj", "did you mean 'model.layers.0.mlp.down_proj'?"),
        ("re:.*dwon_proj", "did you mean 're:.*down_proj'?"),
        ("down_proj", "did you mean 're:.*down_proj'?"),
        ("re:layers.*", "a full name, or `re:` and a pattern"),
    ],
)
def test_an_ignored_layer_that_does_not_exist(entry, expected, tiny_llama, tmp_path):
    (found,) = problems(tmp_path, tiny_llama, f"ignore:\n  - lm_head\n  - '{entry}'\n")
    assert found.startswith(f"r.yaml:8: ignore.1: {entry!r} matches no linear layer; ")
    assert expected in found


def test_fused_layers_stay_together(tiny_llama, tmp_path):
    extra = "ignore: ['re:.*q_proj', 're:.*1.mlp.up_proj']\n"
    found = problems(tmp_path, tiny_llama, extra)
    assert found == [
        "r.yaml:6: ignore.0: model.layers.0.self_attn.qkv_proj fuses q_proj, k_proj, v_proj, but only q_proj is ignored; ignore all of them or none, here and in 1 more: model.layers.1.self_attn.qkv_proj",
        "r.yaml:6: ignore.1: model.layers.1.mlp.gate_up_proj fuses gate_proj, up_proj, but only up_proj is ignored; ignore all of them or none",
    ]


def test_groups_that_do_not_divide_are_told_once(make_model, tmp_path):
    model = make_model("llama", hidden_size=192, intermediate_size=480, num_hidden_layers=3)
    given = "scheme=w4", "scheme.weights.group_size=128"
    (line,) = problems(tmp_path, model, "", *given)
    assert line.startswith(f"--set {given[1]}: 128 does not divide ")
    assert " of 21 layers: model.layers.0.self_attn.q_proj (192), " in line
    assert line.endswith("more; 32 divides all inputs: auto takes what fits each layer")
    model = make_model("llama", intermediate_size=168)
    (line,) = problems(tmp_path, model, "", *given)
    assert (
        "the inputs of 2 of 14 layers: model.layers.0.mlp.down_proj (168), model.layers.1" in line
    )
    assert line.endswith(
        "; no group size divides all inputs: auto takes what fits each layer, or add "
        "'re:.*down_proj' to ignore"
    )


def test_a_gpu_that_is_not_here_is_told_at_its_line(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    solving, reporting = problems(tmp_path, tiny_llama, "device: cuda\nreport: {device: cuda}\n")
    assert solving.startswith("r.yaml:6: device: found 'cuda', but torch ")
    assert "set device: auto" in solving
    assert reporting.startswith("r.yaml:7: report.device: found 'cuda', but torch sees 0 GPUs here")


def test_a_report_runs_where_its_blocks_are_solved(tiny_llama, tmp_path, monkeypatch):
    def runs_on(*overrides: str) -> tuple[str, ...]:
        return report_devices(plan(tmp_path, tiny_llama, "", *overrides).recipe)

    assert runs_on() == ("cpu",)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _=0: "a GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("kernels.devices.check_triton", lambda: None)
    monkeypatch.setattr("ptq.evaluate.comparison.read_shape", lambda *_: None)
    assert runs_on() == ("cuda",)
    assert runs_on("device=cpu") == runs_on("report.device=cpu") == ("cpu",)
    assert runs_on("device={gpus: 2}") == ("cuda:0", "cuda:1")
    assert runs_on("device={gpus: 2}", "report.device=cuda") == ("cuda",)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    assert runs_on() == ("cpu",), "older than the engine's kernels run on"


def test_ignoring_everything_is_an_error(tiny_llama, tmp_path):
    (found,) = problems(tmp_path, tiny_llama, "ignore: ['re:.*']\n")
    assert found.startswith("r.yaml:6: ignore: leaves no layer to the scheme a8w8c8")


def test_an_unsupported_family(tiny_llama, tmp_path):
    edit_config(model := copy(tiny_llama, tmp_path), model_type="qwen33")
    (found,) = problems(tmp_path, model)
    assert found.startswith("r.yaml:1: model.path: model_type 'qwen33' of model is not supported")
    assert f"did you mean 'qwen3'? allowed: {', '.join(MODEL_TYPES)}" in found


def test_a_model_with_code_of_its_own_is_refused(tiny_llama, tmp_path):
    edit_config(model := copy(tiny_llama, tmp_path), auto_map={"AutoModel": "evil.Model"})
    (found,) = problems(tmp_path, model)
    assert "trust_remote_code" in found


def test_a_configuration_that_does_not_fit_the_files(tiny_llama, tmp_path):
    edit_config(model := copy(tiny_llama, tmp_path), intermediate_size=512, num_hidden_layers=3)
    missing, misshaped = problems(tmp_path, model)
    assert missing.startswith("r.yaml:1: model.path: model misses model.layers.2.")
    assert "model.layers.0.mlp.gate_proj.weight is [256, 128], needed is [512, 128]" in misshaped


def test_a_bias_that_the_configuration_does_not_say(tiny_llama, tmp_path):
    """transformers, which calibrates, would leave it out, and the engine would add it."""
    model = copy(tiny_llama, tmp_path)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.bias"
    rows = weights[f"{name.removesuffix('bias')}weight"].shape[0]
    biases = {name: torch.ones(rows), name.replace("k_proj", "v_proj"): torch.zeros(rows)}
    save_file({**weights, **biases}, model / "model.safetensors")
    (found,) = problems(tmp_path, model)
    assert found.endswith(f"does not fit its config.json: {name} is there, needed is none")


def test_a_configuration_that_is_not_valid(tiny_llama, tmp_path):
    edit_config(model := copy(tiny_llama, tmp_path), hidden_size="wide")
    (found,) = problems(tmp_path, model)
    assert found.startswith("r.yaml:1: model.path: model/config.json is not a valid configuration")
    assert "hidden_size" in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "has no tokenizer"),
        ("{", "cannot be loaded"),
        (
            '{"version": "1.0", "added_tokens": [], "model": '
            '{"type": "BPE", "vocab": {"a": "x"}, "merges": []}}',
            "cannot be loaded",
        ),
    ],
)
def test_a_tokenizer_that_is_missing_or_damaged(content, expected, tiny_llama, tmp_path):
    model = copy(tiny_llama, tmp_path)
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    (found,) = problems(tmp_path, model)
    assert found.startswith("r.yaml:1: model.path: ")
    assert expected in found


def test_a_tokenizer_of_another_model(make_model, tmp_path):
    model = copy(make_model(vocab_size=256), tmp_path)
    (found,) = problems(tmp_path, model)
    assert "tokens, the model a vocabulary of 256; they do not belong together" in found


def test_sequences_longer_than_the_model_and_missing_data(tiny_llama, tmp_path):
    found = problems(
        tmp_path,
        tiny_llama,
        "report:\n  speed: {prompt_tokens: 500, new_tokens: 20}\n",
        "dataset.evaluation.sequence_length=513",
        "dataset.name=/nowhere/text.jsonl",
    )
    assert found == [
        "r.yaml:7: report.speed: found 500 prompt and 20 new tokens; the model has 512 positions",
        "--set dataset.name=/nowhere/text.jsonl: no such file: /nowhere/text.jsonl",
        "--set dataset.evaluation.sequence_length=513: found 513; the model has 512 positions",
    ]


@pytest.mark.parametrize("name", ["typo.jsonl", "table.csv", "rows.json"])
def test_a_file_of_data_that_is_not_there_is_no_name_on_the_hub(name, tiny_llama, tmp_path):
    (found,) = problems(tmp_path, tiny_llama, "", f"dataset.name={name}")
    assert found.endswith(f"no such file: {Path.cwd() / name}")


def test_an_output_that_is_taken(tiny_llama, tmp_path):
    (tmp_path / "out").mkdir()
    assert plan(tmp_path, tiny_llama).blocks  # empty is free
    (tmp_path / "out" / "x").touch()
    (found,) = problems(tmp_path, tiny_llama)
    assert found.startswith("r.yaml:5: output.path: out exists already; give --force")
    assert plan(tmp_path, tiny_llama, force=True).blocks


def test_float_zero_points_are_refused_by_name(tiny_llama, tmp_path):
    weights = "{dtype: int4, granularity: group, symmetric: false, zero_points: float}"
    (found,) = problems(tmp_path, tiny_llama, "", "scheme=w4", f"scheme.weights={weights}")
    assert "scheme.weights.zero_points: float zero points are those of .gguf files" in found
    assert found.endswith("set zero_points: integer, or two_level: true for those of Q4_K")


def test_an_output_around_the_model(tiny_llama, tmp_path):
    model = copy(tiny_llama, tmp_path / "out")
    with pytest.raises(RecipeError, match="holds the model itself"):
        plan(tmp_path, model, force=True)
    (found,) = problems(tmp_path, model)  # `--force`, which would not help, is not proposed
    assert "holds the model itself" in found


def test_a_disk_that_is_too_small(tiny_llama, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("ptq.plan.preflight.shutil.disk_usage", lambda _: usage)
    (found,) = problems(tmp_path, tiny_llama)
    assert "has 0 MB free" in found


def test_all_problems_at_once(tiny_llama, tmp_path):
    model = copy(tiny_llama, tmp_path)
    (model / "tokenizer.json").unlink()
    found = problems(
        tmp_path, model, "ignore: [lm_haed]\n", "dataset.calibration.sequence_length=600"
    )
    assert [line.split(": ")[1] for line in found] == [
        "model.path",
        "ignore.0",
        "found 600; the model has 512 positions",
    ]


def test_a_recipe_without_a_file_has_no_lines(tiny_llama, tmp_path):
    loaded = load_recipe(recipe_file(tmp_path, tiny_llama))
    recipe = Recipe.model_validate(dict(loaded) | {"ignore": ("nothing",)})
    with pytest.raises(RecipeError, match=r"^recipe: ignore\.0: 'nothing' matches no linear layer"):
        build_plan(recipe, Checkpoint.open(recipe.model.path))


def test_a_quantized_checkpoint_is_not_quantized_again(tiny_llama, tmp_path, monkeypatch):
    from formats.scheme import PRESETS

    loaded = load_recipe(recipe_file(tmp_path, tiny_llama))
    checkpoint = Checkpoint.open(tiny_llama)
    monkeypatch.setattr(checkpoint, "scheme", PRESETS["a8w8"])
    with pytest.raises(RecipeError, match=r"is quantized already \(a8w8\); give the original"):
        build_plan(loaded, checkpoint)
