"""Schemes of single layers, from the recipe to the engine."""

import json
from functools import partial
from statistics import median

import pytest
import torch
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import PRESETS
from inference.bench import requests
from inference.engine import Engine
from kernels.numerics import TYPES, fake_quantize_activations
from ptq.commands.diff import diff_checkpoints
from ptq.convert.convert import convert
from ptq.methods.clip import Clip, ClipSpec
from ptq.methods.common.block import quantized_block
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.report.inspection import describe, inspect
from tests.experts import MOE
from tests.fake_quantized import dequantized
from tests.families import distance
from tests.ptq.quantizing import executed, goes_on, make_plan, observed_work, opened, weight_bytes

DOWN, FIRST = "re:.*down_proj", r"re:.*layers\.0\."
SMOOTH = SmoothQuantSpec(alpha=0.5)
MIXED = {  # main scheme, layers, methods
    "static + dynamic": ("a8w8", {DOWN: "a8w8_dynamic"}, (SMOOTH, ClipSpec(search_samples=2))),
    "int4 + int8": ("w4", {FIRST: "w8", "re:.*o_proj": "a8w8"}, (SMOOTH,)),
    "fp8 + int4": ("fp8_channel", {DOWN: "a8w4", r"re:.*1\.mlp\.(gate|up)": "w4"}, (SMOOTH,)),
}


def quantized(model, out, kind: str, *last) -> Checkpoint:
    scheme, layers, methods = MIXED[kind]
    methods = (*methods, *(last or (RTNSpec(),)))
    return opened(model, out, scheme, layers=layers, methods=methods)


def reference(model, checkpoint: Checkpoint, theirs: bool = False) -> AutoModelForCausalLM:
    """The float model with the weights that are stored and inputs as each layer sees them."""
    float_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in checkpoint.names():
        if name.endswith(("norm.weight", "_proj.bias")):
            parameter = float_model.get_parameter(name)
            parameter.data = checkpoint.tensor(name).float()
    for name in checkpoint.quantized_modules:
        linear, scheme = float_model.get_submodule(name), checkpoint.scheme_of(name)
        linear.weight.data = dequantized(checkpoint, name)
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


def usual_distance(engine: Engine, model) -> float:
    """Median over prompts: an input on a rounding edge may go either way."""
    prompts = [torch.arange(start, start + 8) for start in range(0, 360, 40)]
    return median(distance(engine.score(ids), logits(model, ids)) for ids in prompts)


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
    engine, model = Engine.from_pretrained(checkpoint.path), reference(tiny_llama, checkpoint)
    # Of int4 groups, inputs are rounded to 16 bits.
    assert usual_distance(engine, model) < (3e-3 if "int4" in kind else 1e-4)


@pytest.mark.parametrize("kind", MIXED)
def test_transformers_opens_a_mixture_as_the_same_function(kind, made, tiny_llama):
    pytest.importorskip("compressed_tensors")
    checkpoint, ids = made[kind], torch.arange(40) % 384
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    a, b = logits(theirs, ids), logits(reference(tiny_llama, checkpoint, theirs=True), ids)
    assert distance(a, b) < 1e-4
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
    about = requests._about(checkpoint)
    assert f"2 layers {dynamic}; head float" in about
    assert f"layers {checkpoint.scheme.of_layers.text}; 2 layers" in about
    packed = {row.kind for row in inspect(made["int4 + int8"]).sizes}
    assert packed >= {"int4 weights, packed", "int8 weights, packed", "int8 weights"}
    lines = diff_checkpoints(checkpoint, made["int4 + int8"])
    name = "scheme of model.layers.1.mlp.down_proj"
    group = "int4 weights group of 128"
    assert f"{name}: '{dynamic}' -> '{group}'" in lines
    with pytest.raises(CheckpointError, match="gptq holds one scheme .* without layers$"):
        convert(made["int4 + int8"].path, tmp_path / "out", "gptq")
    with pytest.raises(CheckpointError, match="Quantize the original model with an fp8_block"):
        convert(made["int4 + int8"].path, tmp_path / "out", "fp8_block")


@pytest.mark.parametrize("kind", MIXED)
def test_gptq_solves_each_layer_by_its_own_scheme(kind, tiny_llama, tmp_path):
    checkpoint = quantized(tiny_llama, tmp_path / "out", kind, GPTQSpec())
    rounded = quantized(tiny_llama, tmp_path / "rtn", kind)
    for name in checkpoint.quantized_modules:
        assert checkpoint.scheme_of(name) == rounded.scheme_of(name)
        assert checkpoint.weight(name).scale.shape == rounded.weight(name).scale.shape
    differ = [n for n in checkpoint.quantized_modules if not same_weight(checkpoint, rounded, n)]
    assert {checkpoint.scheme_of(name) for name in differ} == {
        checkpoint.scheme_of(name) for name in checkpoint.quantized_modules
    }


def same_weight(a: Checkpoint, b: Checkpoint, name: str) -> bool:
    return torch.equal(a.weight(name).q.float(), b.weight(name).q.float())


def test_experts_of_one_input_may_have_schemes_of_their_own(make_model, tmp_path):
    model = make_model("qwen3_moe", **MOE["qwen3_moe"])
    layers = {r"re:.*experts\.1\.(gate|up)_proj": "a8w8_dynamic"}
    made = make_plan(model, tmp_path / "out", "w8", layers=layers, methods=(SMOOTH, GPTQSpec()))
    executed(made)
    checkpoint = Checkpoint.open(tmp_path / "out" / "checkpoint")
    names = [name for name in checkpoint.quantized_modules if ".experts.1." in name]
    assert {checkpoint.scheme_of(n) for n in names if "down" not in n} == {
        PRESETS["a8w8_dynamic"].of_layers
    }
    assert set(checkpoint.own_schemes) == {name for name in names if "down" not in name}


def test_refinement_leaves_fp8_layers_alone(tiny_llama, tmp_path):
    kind = "fp8 + int4"
    refine = RefineSpec(iterations=8, batch=2)
    refined = quantized(tiny_llama, tmp_path / "refined", kind, RTNSpec(), refine)
    rounded = quantized(tiny_llama, tmp_path / "rounded", kind)
    moved = {n for n in refined.quantized_modules if not same_weight(refined, rounded, n)}
    assert moved == {n for n in refined.own_schemes if "int4" in refined.own_schemes[n].text}


def test_refinement_sees_the_block_as_it_will_run(tiny_llama, tmp_path):
    scheme, layers, _ = MIXED["fp8 + int4"]
    work = observed_work(make_plan(tiny_llama, tmp_path, scheme, layers=layers))
    work.quantized.update(round_to_nearest(work))
    down, x = "model.layers.0.mlp.down_proj", work.block.inputs[0]
    weights = {down: work.quantized[down].dequantized()}  # the one that is not fp8
    with torch.no_grad(), quantized_block(work):
        expected = work.block.forward(x, 0)
    with torch.no_grad(), quantized_block(work, refined=True):
        seen = work.block.forward(x, 0, weights)
    assert (seen - expected).norm() / expected.norm() < 1e-5


def test_clipping_chooses_ranges_of_static_inputs_alone(tiny_llama, tmp_path):
    scheme, layers, methods = MIXED["static + dynamic"]
    work = observed_work(make_plan(tiny_llama, tmp_path, scheme, layers=layers))
    clip = Clip(methods[1])
    clip.solve(work)
    assert set(clip.solved) == {name for name in work.targets if "down_proj" not in name}


def test_a_mixture_goes_on_to_the_same_bytes_and_the_size_is_as_predicted(tiny_llama, tmp_path):
    scheme, layers, methods = MIXED["int4 + int8"]
    plans = [
        make_plan(tiny_llama, tmp_path / n, scheme, layers=layers, methods=(*methods, GPTQSpec()))
        for n in "ab"
    ]
    a, b = (partial(executed, plan) for plan in plans)
    found = goes_on(a(), b, by=KeyboardInterrupt)
    assert weight_bytes(found.checkpoint) == plans[0].prediction.checkpoint_bytes
