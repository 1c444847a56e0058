"""Phi-3: stored merged, a part of each head turns, LongRoPE."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from inference.models.config import ModelConfig
from ptq.convert.convert import convert
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothKSpec
from tests.conftest import write_quantized
from tests.families import but_one_in_ci, check_blocks, check_engine, check_quantized
from tests.ptq.quantizing import make_plan, random_tokens

LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1 + 0.1 * i for i in range(12)],
        "long_factor": [2 + 0.3 * i for i in range(12)],
    },
}
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture(scope="module")
def phi3(make_model):
    return make_model("phi3", **LONGROPE)


@pytest.mark.parametrize(("longest", "length"), [(64, 48), (512, 90)])
def test_logits_are_those_of_transformers(phi3, longest, length):
    """Short factors where no request passes 64 tokens, long ones where one may."""
    engine = check_engine(phi3, random_tokens(1, length).ids[0].clamp(min=1), longest)
    assert engine.model.layers[0].cos.shape[1] == 32
    assert int((engine.model.layers[0].sin != 0).any(0).sum()) == 24


def test_default_rotary_embedding_and_a_window(make_model):
    folder = make_model("phi3", sliding_window=24)
    check_engine(folder, random_tokens(1, 60).ids[0].clamp(min=1))


def test_blocks_are_those_of_transformers(phi3):
    check_blocks(phi3)


def test_parts_may_hold_their_scales_in_other_types(make_model, tmp_path):
    """Of one merged layer k is so small that its scales are in fp32, those of q and v in fp16."""
    source = tmp_path / "half"
    shutil.copytree(make_model("phi3", **LONGROPE), source)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "qkv_proj" in name]:
        q, k, v = tensors[name].split([128, 64, 64])
        tensors[name] = torch.cat((q, k * 2.0**-14, v))
    save_file({n: t.half() for n, t in tensors.items()}, source / "model.safetensors")
    write_quantized(source, tmp_path / "out", "w8")
    checkpoint, whole = Checkpoint.open(tmp_path / "out"), Checkpoint.open(source)
    for part in ("q_proj", "k_proj", "v_proj"):
        module = f"model.layers.0.self_attn.{part}"
        weight, stored = whole.tensor(f"{module}.weight").float(), checkpoint.weight(module)
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        assert torch.allclose(stored.scale, scale, rtol=2**-10, atol=0)


def test_merged_layers_are_read_as_their_parts(phi3):
    checkpoint = Checkpoint.open(phi3)
    names = {name.split(".")[-2] for name in checkpoint.names() if "layers.0" in name}
    assert {*PARTS} <= names
    assert not names & {"qkv_proj", "gate_up_proj"}
    with safe_open(phi3 / "model.safetensors", "pt") as file:
        stored = file.get_tensor("model.layers.0.self_attn.qkv_proj.weight")
    attention = "model.layers.0.self_attn"
    parts = [checkpoint.tensor(f"{attention}.{part}_proj.weight") for part in "qkv"]
    assert [len(part) for part in parts] == [128, 64, 64]
    assert torch.equal(torch.cat(parts), stored)


@pytest.mark.parametrize("preset", but_one_in_ci("fp8_channel"))
def test_a_quantized_checkpoint_is_written_merged_again(phi3, tmp_path, preset):
    checkpoint = check_quantized(phi3, tmp_path, preset, longest=64)
    with safe_open(checkpoint.path / "model.safetensors", "pt") as file:
        stored = {name.rpartition(".")[0].rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    assert {"qkv_proj", "gate_up_proj"} <= stored
    assert not stored & {*PARTS}


def test_k_is_smoothed_where_only_a_part_of_each_head_turns(phi3, tmp_path):
    methods = (SmoothKSpec(alpha=0.5), RTNSpec())
    checkpoint = check_quantized(phi3, tmp_path, "a8w8c8", longest=64, methods=methods)
    assert checkpoint.scheme.kv_cache is not None


@pytest.mark.parametrize("preset", ["fp8_tensor", "fp8_block"])
def test_scales_that_do_not_lie_side_by_side_are_refused(phi3, tmp_path, preset):
    with pytest.raises(RecipeError, match=r"does not fit model.layers.0.self_attn.qkv_proj"):
        make_plan(phi3, tmp_path, preset, methods=(RTNSpec(),))


def test_it_is_not_converted_to_other_layouts(phi3, tmp_path):
    with pytest.raises(CheckpointError, match="hold qkv_proj and gate_up_proj in the place"):
        convert(phi3, tmp_path / "out", "float")


def test_gpus_take_it(phi3):
    backend = pytest.importorskip("inference.gpu.backend")
    config = ModelConfig.of(Checkpoint.open(phi3).config)
    backend.TritonBackend(torch.device("cpu"), torch.float16).check(config)
