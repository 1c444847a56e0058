"""Rotation: Hadamard matrices, the same function in another basis, and what it does to outliers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.join import MergedLayers
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.residual_rotation import hadamard_matrix, random_rotation, rotation_seeds
from formats.scheme import PRESETS
from inference.engine import Engine
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rotation import RotatedCheckpoint, RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.plan.describe import describe_plan, explain
from tests.experts import MOE
from tests.families import distance, transformers_logits
from tests.ptq.quantizing import (
    IDS,
    divergence,
    edit_model,
    enlarge_v,
    executed,
    goes_on,
    make_plan,
    quantized,
    scored,
    weight_bytes,
)

MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "hidden_size": 96, "head_dim": 24},
    "qwen2": {"num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": False},
    "qwen3": {"attention_bias": True, "hidden_size": 100, "head_dim": 20},  # no Hadamard matrix
    "mistral": {},
} | MOE
FILE = "model.safetensors"
ROTATED_RTN = (RotationSpec(), RTNSpec())


def write_view(source: Path, target: Path, spec: RotationSpec, dtype: torch.dtype) -> Path:
    """The rotated model as a folder of its own, made from the source in `dtype`."""

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    plain = edit_model(source, target.with_name(f"{target.name}-plain"), widen)
    view = RotatedCheckpoint(Checkpoint.open(plain), spec)
    target.mkdir()
    tensors = {name: view.tensor(name).contiguous() for name in view.names()}
    assert all(t.dtype == view.dtype(n) == dtype for n, t in tensors.items())
    assert all(tuple(t.shape) == view.shape(n) for n, t in tensors.items())
    merged = MergedLayers(view.config)
    tensors = dict(pair for item in tensors.items() for pair in merged.add(*item))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(dict(view.config)))
    for path in view.auxiliary_files:
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("size", [1, 2, 12, 20, 28, 36, 48, 64, 76, 96, 896])
def test_hadamard_matrices(size):
    matrix = hadamard_matrix(size)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 50, 92, 100])
def test_sizes_without_one_get_another_orthogonal_matrix(size):
    assert hadamard_matrix(size) is None
    rotation = random_rotation(size, 0)
    assert torch.allclose(rotation @ rotation.T, torch.eye(size).double(), atol=1e-13)


def test_rotations_follow_from_their_seed():
    for size in (64, 100):
        assert torch.equal(random_rotation(size, 1), random_rotation(size, 1))
        assert not torch.equal(random_rotation(size, 1), random_rotation(size, 2))
    assert random_rotation(64, 1).abs().unique().tolist() == [0.125]


@pytest.mark.parametrize("family", MODELS)
def test_the_function_stays(make_model, tmp_path, family):
    model = make_model(family, **MODELS[family])
    expected = transformers_logits(model, IDS)
    rotated = write_view(model, tmp_path / "fp32", RotationSpec(seed=3), torch.float32)
    assert distance(transformers_logits(rotated, IDS), expected) < 1e-5
    kept = Engine.from_pretrained(rotated).score(IDS)
    assert distance(kept, expected) < 1e-4
    rotated = write_view(model, tmp_path / "bf16", RotationSpec(seed=3), torch.bfloat16)
    assert 1e-4 < distance(transformers_logits(rotated, IDS), expected) < 0.03


@pytest.mark.parametrize("part", ["residual", "values"])
def test_each_part_alone_keeps_the_function(make_model, tmp_path, part):
    model = make_model("qwen2")
    spec = RotationSpec(residual=part == "residual", values=part == "values")
    rotated = write_view(model, tmp_path / "rotated", spec, torch.float32)
    assert distance(transformers_logits(rotated, IDS), transformers_logits(model, IDS)) < 1e-5
    before, after = (load_file(m / "model.safetensors") for m in (model, rotated))
    assert ("lm_head.weight" in after) == (part == "residual")
    changed = {n.split(".", 3)[3] for n in before if n.startswith("model.layers.0") and not
               torch.equal(before[n].float(), after[n])}  # fmt: skip
    values = {"self_attn.v_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight"}
    assert changed == values if part == "values" else changed > values - {"self_attn.v_proj.bias"}
    norm = after["model.layers.0.input_layernorm.weight"]
    assert bool((norm == 1).all()) == (part == "residual")


@pytest.mark.parametrize(("preset", "factor"), [("a8w8", 30), ("w4", 1 / 8)])
def test_outliers_of_the_residual_stream_are_spread(make_model, tmp_path, preset, factor):
    """Two channels are far larger than the others in the stream, or in the weights that read it."""

    def plant(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name == "model.embed_tokens.weight":
                tensor[:, [5, 70]] *= factor
            elif tensor.dim() == 2 and not name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[:, [5, 70]] /= factor

    model = edit_model(make_model("llama", tie_word_embeddings=False), tmp_path / "model", plant)
    expected = transformers_logits(model, IDS).log_softmax(-1)
    found = {}
    for name, methods in {"plain": (RTNSpec(),), "rotated": ROTATED_RTN}.items():
        result = quantized(model, tmp_path / name, preset, methods=methods)
        found[name] = divergence(expected, scored(result.checkpoint))
    assert found["rotated"] < found["plain"] / 2


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_channels_of_v_that_stand_out_are_evened_before_they_turn(make_model, tmp_path, family):
    """What o divides by brings no noise: V that turns is the same, whatever o makes up for."""

    model = make_model(family)
    planted = edit_model(model, tmp_path / "planted", enlarge_v)
    plain, found = (
        load_file(write_view(m, tmp_path / m.name[:5], RotationSpec(), torch.float32) / FILE)
        for m in (model, planted)
    )
    assert all(distance(found[name], plain[name]) < 1e-6 for name in plain)


def test_the_written_checkpoint_is_as_predicted_and_others_open_it(tiny_llama, tmp_path):
    """Untied, its size told before, and the same in transformers as in our engine."""
    methods = (RotationSpec(), GPTQSpec())
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=methods)
    result = executed(plan)
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert rotation_seeds(checkpoint.config) == (0,)
    assert checkpoint.shape("lm_head.weight") == (384, 128)
    assert not torch.equal(
        checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight")
    )
    assert plan.prediction.checkpoint_bytes == weight_bytes(result.checkpoint)
    expected = transformers_logits(result.checkpoint, IDS)
    assert distance(Engine.from_pretrained(result.checkpoint).score(IDS), expected) < 0.01
    text = "\n".join([*describe_plan(plan, {}), *explain(plan, "*layers.0.*v_proj")])
    assert "residual stream (Hadamard 128), values of each head (Hadamard 32)" in text
    assert f"adds {384 * 128 * 2 / 1e6:.1f} MB" in text
    assert "rotation: " in text


def test_a_stopped_run_goes_on_with_the_same_bytes(tiny_llama, tmp_path):
    methods = (RotationSpec(), SmoothQuantSpec(alphas=(0.8,), search_samples=2), RTNSpec())
    expected = quantized(tiny_llama, tmp_path / "whole", methods=methods)
    goes_on(expected, lambda: quantized(tiny_llama, tmp_path / "out", methods=methods))


def test_tensors_of_unknown_place_are_refused(tiny_llama, tmp_path):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.adapter.weight"] = torch.zeros(4, 128)

    model = edit_model(tiny_llama, tmp_path / "model", add)
    with pytest.raises(
        RecipeError, match=r"rotation: model.layers.1.mlp.adapter.weight of .*known"
    ):
        RotatedCheckpoint(Checkpoint.open(model), RotationSpec())


def test_orders_and_options_that_do_not_fit(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="the order is rotation, smoothquant, rtn"):
        make_plan(tiny_llama, tmp_path, methods=(SmoothQuantSpec(), RotationSpec(), RTNSpec()))
    with pytest.raises(ValueError, match="rotates nothing"):
        RotationSpec(residual=False, values=False)
    with pytest.raises(ValueError, match="leaves weights and"):
        make_plan(tiny_llama, tmp_path, PRESETS["c8"], methods=(RotationSpec(),))
