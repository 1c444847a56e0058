"""Groups of `quantization_config`: which layer is of which, in what we write and in what we read."""

import json
import re
import shutil

import pytest
import torch

from formats.checkpoint.compressed_tensors import find_scheme, quantization_config, read_groups
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.targets import is_ignored, layer_targets
from formats.errors import CheckpointError
from formats.families.registry import predicting_patterns
from formats.scheme import PRESETS
from inference.engine import Engine
from inference.models.read import read_linear

MAIN, OTHER = PRESETS["a8w8"].of_layers, PRESETS["a8w8_dynamic"].of_layers
LEAVES = [f"self_attn.{leaf}_proj" for leaf in "qkvo"]
LEAVES += [f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
NAMES = [f"model.layers.{i}.{leaf}" for i in range(12) for leaf in LEAVES]
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def fused(name: str) -> str:
    module, _, leaf = name.removesuffix("_proj").rpartition(".")
    return f"{module}.{FUSED.get(leaf, leaf)}_proj"


def check_targets(groups, names, called) -> None:
    """The targets of groups mean their layers alone, by every name that a layer is called by."""
    targets = layer_targets(groups)
    for name in names:
        for own in called(name):
            found = [any(re.match(t.removeprefix("re:"), own) for t in ts) for ts in targets]
            assert found == [name in members for members in groups], own


@pytest.mark.parametrize(
    "other",
    [r".*down_proj", r".*layers\.1\.", r".*layers\.(0|11)\.self_attn\.[qkv]", r".*(gate|up)_proj"],
)
def test_targets_mean_their_layers_alone_by_their_own_and_by_the_fused_name(other):
    chosen = [name for name in NAMES if re.match(other, name)]
    groups = [[name for name in NAMES if name not in chosen], chosen]
    check_targets(groups, NAMES, lambda name: (name, fused(name), f"language_model.{name}"))


@pytest.mark.parametrize("where", ["mtp.layers.0", "model.mtp_layers.0", "model.layers.12"])
def test_layers_for_further_tokens_are_told_from_blocks(where):
    further = [f"{where}.{leaf}" for leaf in LEAVES]
    groups = [[n for n in NAMES if ".0." not in n], further[:3], [*further[3:], *NAMES[:7]]]
    check_targets(groups, [*NAMES, *further], lambda name: (name, f"language_model.{name}"))


FURTHER = {  # of 12 blocks: where files have the layer, where vLLM has it, and what is around it
    "deepseek_v3": ("model.layers.12", "model.layers.12", "eh_proj"),
    "glm4_moe": ("model.layers.12", "model.layers.12", "eh_proj"),
    "mimo": ("model.mtp_layers.0", "model.layers.12", "input_proj"),
    "qwen3_next": ("mtp.layers.0", "mtp.layers.0", "mtp.fc"),
    "qwen3_5_text": ("mtp.layers.0", "mtp.layers.0", "mtp.fc"),
}


def served(config, name, merges):
    """The group that vLLM finds for a linear layer, by its own names; None for one left alone.

    Args:
        merges: Whether the class of the model tells which layers it merges.
    """
    module, _, leaf = name.rpartition(".")
    parts = [f"{part}_proj" for part, own in FUSED.items() if f"{own}_proj" == leaf and merges]
    parts = [] if name in config["ignore"] else parts
    left = {is_ignored(own, config["ignore"]) for own in [f"{module}.{p}" for p in parts] or [name]}
    assert len(left) == 1
    if left == {True}:
        return None
    (found,) = (
        group
        for group, own in config["config_groups"].items()
        if is_ignored(name, own["targets"]) or own["targets"] == ["Linear"]
    )
    return found


@pytest.mark.parametrize("others", ["one scheme", "several", "attention alone", "nothing"])
@pytest.mark.parametrize("kind", FURTHER)
def test_vllm_finds_layers_for_further_tokens_by_its_names(kind, others):
    """Quantized as the blocks, otherwise, in part, and not at all; merged layers as well."""
    stored, there, around = FURTHER[kind]
    model = {"model_type": kind, "num_hidden_layers": 12}
    further = [f"{stored}.{leaf}" for leaf in LEAVES]
    kept = further[4:] if others == "attention alone" else further if others == "nothing" else []
    own = OTHER if others in ("several", "attention alone") else MAIN
    layers = dict.fromkeys(NAMES, MAIN) | {name: own for name in further if name not in kept}
    ignore = [around, *kept]
    if others == "nothing":
        ignore += predicting_patterns(model, [f"{name}.weight" for name in further])
    config = quantization_config(MAIN, ignore, layers, config=model)
    for name in {*map(fused, NAMES)}:
        assert served(config, name, merges=True) == "group_0"
    wanted = "group_0" if others == "one scheme" else "group_1"
    for leaf in LEAVES:
        name, left = fused(f"{there}.{leaf}"), f"{stored}.{leaf}" in kept
        found = served(config, name, merges=kind.startswith("qwen3"))
        assert found == (None if left else wanted), name
    groups = read_groups(config)
    assert {name: find_scheme(name, groups) for name in layers} == layers


def test_targets_of_experts():
    names = [
        f"model.layers.{block}.mlp.experts.{i}.{leaf}_proj"
        for block in (0, 10)
        for i in (1, 11)
        for leaf in ("gate", "up", "down")
    ]
    gated = r"(gate_proj|up_proj|gate_up_proj)$"
    down = [name for name in names if "down" in name]
    first, second = layer_targets([[name for name in names if name not in down], down])
    assert first == [rf"re:.*layers\.\d+\.mlp\.experts\.\d+\.{gated}"]
    assert second == [r"re:.*layers\.\d+\.mlp\.experts\.\d+\.(down_proj)$"]
    first, second = layer_targets([names[:2], names[2:]])
    assert first == [rf"re:.*layers\.(0)\.mlp\.experts\.1\.{gated}"]
    found = [any(re.match(target[3:], name) for target in second) for name in names]
    assert found == [False] * 2 + [True] * 10


def test_the_head_is_of_a_group_where_it_has_a_scheme_and_ignored_elsewhere():
    for others in (MAIN, OTHER):
        layers = dict.fromkeys(NAMES, MAIN) | {"lm_head": others}
        config = quantization_config(MAIN, [], layers)
        assert config["ignore"] == []
        groups = read_groups(config)
        assert {name: find_scheme(name, groups) for name in layers} == layers
    first, second = layer_targets([NAMES, ["lm_head"]])
    assert not any(re.match(target[3:], "lm_head") for target in first)
    assert second == ["re:.*lm_head$"]
    config = quantization_config(MAIN, [], dict.fromkeys(NAMES, MAIN))
    assert config["ignore"] == ["lm_head"]


def test_one_scheme_is_written_as_without_layers():
    for preset in PRESETS.values():
        alone = quantization_config(preset, ["lm_head"])
        given = quantization_config(preset, ["lm_head"], dict.fromkeys(NAMES, preset.of_layers))
        assert json.dumps(alone) == json.dumps(given)


def test_groups_are_read_back_and_a_name_goes_before_a_class():
    layers = {name: OTHER if "down" in name else MAIN for name in NAMES}
    config = quantization_config(MAIN, ["lm_head"], layers)
    groups = read_groups(config)
    assert [scheme for _, scheme in groups] == [MAIN, OTHER]
    assert {name: find_scheme(name, groups) for name in NAMES} == layers
    foreign = config["config_groups"]
    foreign["group_0"]["targets"] = ["Linear"]
    assert {name: find_scheme(name, read_groups(config)) for name in NAMES} == layers
    foreign["group_1"]["targets"] = [NAMES[6]]
    groups = read_groups(config)
    assert [find_scheme(name, groups) for name in (NAMES[6], NAMES[13])] == [OTHER, MAIN]


def edited(source, folder, *targets):
    """A copy of a checkpoint of one group, with that group's targets, and one more group's."""
    out = shutil.copytree(source, folder / "out")
    shutil.rmtree(out / "quant")
    config = json.loads((out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = targets[0]
    for more in targets[1:]:
        inputs = groups["group_0"]["input_activations"] | {"strategy": "token", "dynamic": True}
        groups["group_1"] = groups["group_0"] | {"targets": more, "input_activations": inputs}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([["re:.*mlp.*"]], "q_proj|k_proj.*not expected"),
        ([["Linear"], ["re:.*down_proj"]], "down_proj.input_scale and 1 more: not expected"),
        ([["re:("]], "targets"),
        ([[]], "targets"),
    ],
)
def test_a_layer_must_have_the_tensors_of_its_own_scheme(
    targets, message, tiny_llama, make_quantized, tmp_path
):
    source = make_quantized(tiny_llama, "a8w8")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(edited(source, tmp_path, *targets))


def test_layers_that_run_as_one_must_have_one_scheme(tiny_llama, make_quantized, tmp_path):
    source = make_quantized(tiny_llama, "a8w8_dynamic")
    out = edited(source, tmp_path, ["Linear"], ["re:.*k_proj"])
    Engine.from_pretrained(out)  # two groups of one scheme are no matter
    checkpoint = Checkpoint.open(out)
    checkpoint._schemes["model.layers.0.self_attn.k_proj"] = MAIN
    names = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    with pytest.raises(CheckpointError, match="layers that run as one differ in their scheme"):
        read_linear(checkpoint, names, torch.device("cpu"))
