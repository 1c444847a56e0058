"""Settings of other software: in files of their own, and of several kinds of layers."""

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.awq import pack_awq
from formats.scheme import WeightSpec
from formats.stored.weights import StoredWeight
from inference.engine import Engine
from ptq.convert.convert import convert
from ptq.methods.common.rounding import round_weight
from tests.families import distance
from tests.ptq.convert.foreign_folders import (
    AUTO_ROUND_CONFIG,
    GPTQ_CONFIG,
    as_floats,
    auto_round_layer,
    few_bits_layer,
    logits,
    lost,
    make_folder,
    nvfp4_layer,
    stays,
)
from tests.refusals import refused_checkpoint

DOWN = "model.layers.1.mlp.down_proj"
GPTQ = GPTQ_CONFIG | {"sym": False}
OLD_GPTQ = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "damp_percent": 0.01}
OLD_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
W4 = few_bits_layer(4, 32)


def awq_layer(weight: Tensor, size: int = 32) -> dict[str, Tensor]:
    spec = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)
    made = round_weight(weight, spec, torch.float16)
    if size != 32:
        groups = weight.unflatten(1, (-1, size))
        scale = groups.abs().amax(-1).div(7).half().float()
        q = (groups / scale[..., None]).round().to(torch.int8).flatten(1)
        made = StoredWeight(q, scale)
    return pack_awq(made, size)


def fp8_layer(weight: Tensor) -> dict[str, Tensor]:
    """ModelOpt's and vLLM's, inputs static."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.03),
    }


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("layer", "config", "name", "beside"),
    [
        (W4, GPTQ, "quantize_config.json", GPTQ),
        (W4, GPTQ, "quantize_config.json", OLD_GPTQ),
        (W4, GPTQ, "quantize_config.json", OLD_GPTQ | {"dynamic": {"+:.*": {"bits": 4}}}),
        (awq_layer, AWQ, "quant_config.json", OLD_AWQ),
        (awq_layer, AWQ, "quant_config.json", {k: v for k, v in AWQ.items() if v != "awq"}),
        (awq_layer, AWQ, "quantize_config.json", OLD_AWQ),
        (auto_round_layer, AUTO_ROUND_CONFIG, "quantization_config.json", AUTO_ROUND_CONFIG),
        (fp8_layer, FP8, "hf_quant_config.json", MODELOPT),
    ],
)
def test_settings_in_a_file_of_their_own(layer, config, name, beside, tiny_llama, tmp_path):
    usual = make_folder(tiny_llama, tmp_path / "usual", layer, config)
    alone = make_folder(tiny_llama, tmp_path / "alone", layer, None)
    (alone / name).write_text(json.dumps(beside))
    assert torch.equal(logits(alone), logits(usual))
    stays(logits(usual), alone, tmp_path, 0.3)


def test_wrong_settings_in_a_file_of_their_own_are_named_with_it(tiny_llama, tmp_path):
    folder = make_folder(tiny_llama, tmp_path / "alone", W4, None)
    (folder / "quantize_config.json").write_text(json.dumps(OLD_GPTQ | {"bits": 5}))
    with pytest.raises(CheckpointError, match="^quantize_config.json: found bits 5; allowed: 4, 8"):
        Checkpoint.open(folder)
    (folder / "quantize_config.json").write_text("[]")
    refused_checkpoint("quantize_config.json", convert, folder, tmp_path / "float", "float")


def test_a_float_model_is_one_whatever_settings_lie_beside_it(tiny_llama, tmp_path):
    folder = make_folder(tiny_llama, tmp_path / "model", lambda w: {"weight": w.bfloat16()}, None)
    (folder / "quantize_config.json").write_text(json.dumps(OLD_GPTQ))
    assert torch.equal(logits(folder), logits(tiny_llama))


def test_integers_without_any_settings_are_told_as_such(tiny_llama, tmp_path):
    folder = make_folder(tiny_llama, tmp_path / "alone", W4, None)
    for run in (Checkpoint.open, lambda path: convert(path, tmp_path / "float", "float")):
        refused_checkpoint(r"qweight.*quantization_config.*quantize_config", run, folder)


DOWN8 = {"down_proj": few_bits_layer(8, 64)}
RULES = {"+:.*down_proj": {"bits": 8, "group_size": 64}}


@pytest.mark.parametrize(
    ("change", "others", "kinds"),
    [
        ({"dynamic": {"+:.*down_proj": {"bits": 4}}}, {}, {"int4"}),
        ({"dynamic": RULES}, DOWN8, {"int4", "int8"}),
        ({"dynamic": {".*down_proj": RULES["+:.*down_proj"]}}, DOWN8, {"int4", "int8"}),
        ({"dynamic": RULES | {"+:.*": {"bits": 8, "group_size": 32}}, "bits": 8}, DOWN8, None),
        (
            {"dynamic": {"+:.*down_proj": {"group_size": 256}}},
            {"down_proj": few_bits_layer(4, 256)},
            None,
        ),
    ],
)
def test_layers_of_several_settings_run(change, others, kinds, tiny_llama, tmp_path):
    usual = few_bits_layer(change.get("bits", 4), 32)
    folder = make_folder(tiny_llama, tmp_path / "source", usual, GPTQ | change, others)
    checkpoint = Checkpoint.open(folder)
    schemes = [checkpoint.scheme_of(module).weights for module in checkpoint.quantized_modules]
    assert kinds is None or {spec.dtype for spec in schemes if spec} == kinds
    stays(logits(folder), folder, tmp_path, 1e-3)


@pytest.mark.parametrize("name", [DOWN, r"layers\.1\..*down", ".*1.mlp.down_proj"])
def test_auto_rounds_mixed_bits_run(name, tiny_llama, tmp_path):
    config = AUTO_ROUND_CONFIG | {"extra_config": {"lm_head": {"bits": 16}, name: {"bits": 8}}}
    config["extra_config"][name] |= {"sym": False}
    folder = make_folder(
        tiny_llama, tmp_path / "source", auto_round_layer, config, {DOWN: few_bits_layer(8, 32)}
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "g_idx" not in n}, folder / "model.safetensors")
    found = Checkpoint.open(folder)
    assert {name for name, own in found.own_schemes.items() if own.weights} == {DOWN}
    as_floats(folder, tmp_path / "float")
    assert distance(logits(folder), logits(tmp_path / "float")) < 1e-3


@pytest.mark.parametrize(
    ("layer", "config", "others", "words"),
    [
        (
            W4,
            GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 3}}},
            (3, 32),
            "down_proj: found bits 3",
        ),
        (W4, GPTQ | {"dynamic": {"+:.*down_proj": {"group_size": 16}}}, (4, 16), "group_size 16"),
        (partial(awq_layer, size=16), AWQ | {"group_size": 16}, None, "found group_size 16"),
    ],
)
def test_what_no_kernel_takes_becomes_a_float_model(
    layer, config, others, words, tiny_llama, tmp_path
):
    own: dict[str, Callable] = {"down_proj": few_bits_layer(*others)} if others else {}
    folder = make_folder(tiny_llama, tmp_path / "source", layer, config, own)
    refused_checkpoint(f"{words}.*convert .* FLOAT --to float", Checkpoint.open, folder)
    found = as_floats(folder, tmp_path / "float")
    for module in (DOWN, "model.layers.0.self_attn.v_proj"):
        assert lost(found, tiny_llama, module) < 0.2, module


@pytest.mark.parametrize("dynamic", [{"+:(": {}}, {"+:.*": 8}, {"+:.*": {"bits": 5}}])
def test_odd_rules_are_named(dynamic, tiny_llama, tmp_path):
    folder = make_folder(tiny_llama, tmp_path / "source", W4, GPTQ | {"dynamic": dynamic})
    refused_checkpoint("quantization_config: .*dynamic", Checkpoint.open, folder)


def test_modelopts_fp4_becomes_a_float_model(tiny_llama, tmp_path):
    def layer(weight: Tensor) -> dict[str, Tensor]:
        own = nvfp4_layer(weight)
        return {
            "weight": own["weight_packed"],
            "weight_scale": own["weight_scale"],
            "weight_scale_2": (1 / own["weight_global_scale"]).reshape(()),
            "input_scale": torch.tensor(0.01),
        }

    folder = make_folder(tiny_llama, tmp_path / "source", layer, None)
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        CheckpointError, match="hf_quant_config.json, of .*quant_algo 'NVFP4'.*float"
    ):
        Checkpoint.open(folder)
    assert lost(as_floats(folder, tmp_path / "float"), tiny_llama, DOWN) < 0.12


def test_layers_that_run_as_one_and_differ_name_the_way_to_a_float_model(tiny_llama, tmp_path):
    rules = {"dynamic": {"+:.*q_proj": {"bits": 8}}}
    eight = {"q_proj": few_bits_layer(8, 32)}
    folder = make_folder(tiny_llama, tmp_path / "source", W4, GPTQ | rules, eight)
    with pytest.raises(CheckpointError, match="differ in their scheme.*convert .* --to float"):
        Engine.from_pretrained(folder)
    convert(folder, tmp_path / "float", "float")
    assert torch.isfinite(logits(tmp_path / "float")).all()
