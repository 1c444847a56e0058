"""Schemes of single layers, from the recipe to the engine."""

from __future__ import annotations

import json

import pytest
import torch
from quantizing import make_plan, random_tokens
from transformers import AutoModelForCausalLM

from formats.checkpoint import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.scheme import PRESETS
from inference.engine import Engine
from kernels.numerics import TYPES, dequantize, fake_quantize_activations
from ptq.check import describe_plan
from ptq.convert import convert
from ptq.diff import diff_checkpoints
from ptq.explain import explain
from ptq.inspect import describe, inspect
from ptq.methods.specs import ClipSpec, GPTQSpec, RefineSpec, RTNSpec, SmoothQuantSpec
from ptq.pipeline import quantize_tokens
from ptq.recipe import load_recipe, resolved_yaml
from tests.ptq.test_plan import plan, problems

DOWN, FIRST = "re:.*down_proj", r"re:.*layers\.0\."
SMOOTH = SmoothQuantSpec(alpha=0.5)
MIXED = {  # main scheme, layers, methods
    "static + dynamic": ("a8w8", {DOWN: "a8w8_dynamic"}, (SMOOTH, ClipSpec(search_samples=2))),
    "int4 + int8": ("w4", {FIRST: "w8", "re:.*o_proj": "a8w8"}, (SMOOTH,)),
    "fp8 + int4": ("fp8_channel", {DOWN: "a8w4", r"re:.*1\.mlp\.(gate|up)": "w4"}, (SMOOTH,)),
}


def quantized(model, out, kind: str, *last) -> Checkpoint:
    scheme, layers, methods = MIXED[kind]
    made = make_plan(model, out, scheme, layers=layers, methods=(*methods, *(last or (RTNSpec(),))))
    quantize_tokens(made, random_tokens(), progress=False)
    return Checkpoint.open(out / "checkpoint")


def reference(model, checkpoint: Checkpoint, theirs: bool = False) -> AutoModelForCausalLM:
    """The float model with the weights that are stored and inputs as each layer sees them."""
    float_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in checkpoint.names():
        if name.endswith(("norm.weight", "_proj.bias")):
            parameter = float_model.get_parameter(name)
            parameter.data = checkpoint.tensor(name).float()
    for name in checkpoint.quantized_modules:
        linear, stored, scheme = (
            float_model.get_submodule(name),
            checkpoint.weight(name),
            checkpoint.scheme_of(name),
        )
        assert scheme.weights is not None
        block = scheme.weights.block
        linear.weight.data = dequantize(stored.q, stored.scale, stored.zero_point, block)
        scale = checkpoint.tensor(f"{name}.input_scale")[0] if scheme.static_input else None

        def hook(_, args, spec=scheme.activations, scale=scale):
            if theirs and spec.dtype == "int8":  # -128 is one of theirs, and 127.5 the top
                step = (args[0].abs().amax(-1, keepdim=True) / 127.5).clamp(min=1e-12)
                step = step if scale is None else scale
                return ((args[0] / step).round().clamp(-128, 127) * step,)
            return (fake_quantize_activations(args[0], scale, TYPES[spec.dtype], spec.group),)

        if scheme.activations is not None:
            linear.register_forward_pre_hook(hook)
    return float_model


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory):
    """Each mixture once: the checkpoint."""
    folder = tmp_path_factory.mktemp("mixed")
    return {kind: quantized(tiny_llama, folder / kind.replace(" ", ""), kind) for kind in MIXED}


@pytest.mark.parametrize("kind", MIXED)
def test_each_layer_is_stored_and_run_by_its_own_scheme(kind, made, tiny_llama):
    checkpoint, (main, layers, _) = made[kind], MIXED[kind]
    checkpoint = Checkpoint.open(checkpoint.path, verify=True)
    assert checkpoint.scheme == PRESETS[main]
    found = {checkpoint.scheme_of(name) for name in checkpoint.quantized_modules}
    assert found == {PRESETS[name].of_layers for name in (main, *layers.values())}
    table = checkpoint.scale_table
    assert table is not None
    for row in table.entries:
        scheme = checkpoint.scheme_of(row.module)
        spec = scheme.weights if row.role == "weight" else scheme.activations
        assert spec is not None
        assert (row.dtype, row.granularity) == (spec.dtype, spec.granularity)
    ids = torch.arange(40) % 384
    engine = Engine.from_pretrained(checkpoint.path)
    ours, exact = engine.score(ids), logits(reference(tiny_llama, checkpoint), ids)
    assert (ours - exact).norm() / exact.norm() < 1e-4
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("kind", MIXED)
def test_transformers_opens_a_mixture_as_the_same_function(kind, made, tiny_llama):
    pytest.importorskip("compressed_tensors")
    checkpoint, ids = made[kind], torch.arange(40) % 384
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    a, b = logits(theirs, ids), logits(reference(tiny_llama, checkpoint, theirs=True), ids)
    assert (a - b).norm() / b.norm() < 1e-4
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def test_the_file_names_layers_for_readers_of_fused_and_of_unfused_ones(made):
    config = json.loads((made["int4 + int8"].path / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["format"] == "mixed-precision"
    groups = quantization["config_groups"].values()
    assert [(group["format"], group["targets"]) for group in groups] == [
        (
            "pack-quantized",
            [
                r"re:.*layers\.(1)\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)$",
                r"re:.*layers\.(1)\.mlp\.(gate_proj|up_proj|down_proj|gate_up_proj)$",
            ],
        ),
        (
            "pack-quantized",
            [
                r"re:.*layers\.(0)\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)$",
                r"re:.*layers\.(0)\.mlp\.(gate_proj|up_proj|down_proj|gate_up_proj)$",
            ],
        ),
        ("int-quantized", [r"re:.*layers\.\d+\.self_attn\.(o_proj)$"]),
    ]
    config = json.loads((made["static + dynamic"].path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"


def test_tools_tell_schemes_of_layers_apart(made, tiny_llama, tmp_path):
    checkpoint = made["static + dynamic"]
    shown = "\n".join(describe(inspect(checkpoint), 3))
    dynamic = "int8 weights per_channel, dynamic int8 inputs per_token"
    assert f"otherwise 2 layers, such as model.layers.0.mlp.down_proj: {dynamic}" in shown
    packed = {row.kind for row in inspect(made["int4 + int8"]).sizes}
    assert packed >= {"int4 weights, packed", "int8 weights, packed", "int8 weights"}
    lines = diff_checkpoints(checkpoint, made["int4 + int8"])
    name = "scheme of model.layers.1.mlp.down_proj"
    group = "int4 weights group of 128"
    assert f"{name}: '{dynamic}' -> '{group}'" in lines
    with pytest.raises(CheckpointError, match="gptq holds one scheme for all layers"):
        convert(made["int4 + int8"].path, tmp_path / "out", "gptq")
