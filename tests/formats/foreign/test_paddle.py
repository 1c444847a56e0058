"""PaddleNLP's tables, read: numbers worked out by hand, and everything that does not fit."""

import json
from copy import deepcopy

import pytest
import torch

from formats.foreign.paddle import read_paddle
from tests.refusals import refused_checkpoint as refused

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 128,
}
SHAPES = {"model.layers.0.self_attn.q_proj": (2, 3), "model.layers.0.mlp.up_proj": (1, 3)}
Q, UP = "llama.layers.0.self_attn.q_proj", "llama.layers.0.mlp.up_proj"
CACHE = "llama.layers.0.self_attn.cache{}_matmul.activation_quanter"
TABLES = {
    "act_scales.json": {f"{Q}.activation_quanter": 254, f"{UP}.activation_quanter": [63.5]},
    "weight_scales.json": {f"{Q}.weight_quanter": [127, 12.7], f"{UP}.weight_quanter": [1.0]},
    "cachekv_scales.json": {
        CACHE.format("k"): [127.0, 127.0, 254.0, 254.0],
        CACHE.format("v"): [1.27, 1.27, 3.81, 3.81],
    },
}


@pytest.fixture
def write(tmp_path):
    def write(tables):
        for name, table in tables.items():
            (tmp_path / name).write_text(json.dumps(table))
        return tmp_path

    return write


def test_golden_numbers(write):
    scales = read_paddle(write(TABLES), CONFIG, SHAPES)
    q, up = SHAPES
    assert {module: scale.tolist() for module, scale in scales.inputs.items()} == {
        q: [2.0],
        up: [0.5],
    }
    assert scales.weights[q].dtype == torch.float32
    assert torch.equal(scales.weights[q], torch.tensor([[1.0], [0.1]]))
    assert torch.equal(scales.weights[up], torch.tensor([[1.0]]) / 127)
    k, v = scales.cache["model.layers.0.self_attn"]
    assert k.tolist() == [1.0, 2.0]
    assert torch.equal(v, torch.tensor([0.01, 0.03]))


def test_every_scale_comes_back_from_its_product():
    """Dividing the fp64 product gives the fp32 scale; dividing the fp32 product does not always."""
    scale = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1e-6
    assert torch.equal((scale.double() * 127 / 127).float(), scale)
    assert not torch.equal(scale * 127 / 127, scale)


def test_empty_tables_leave_their_part(write):
    tables = TABLES | {"act_scales.json": {}, "cachekv_scales.json": {}}
    scales = read_paddle(write(tables), CONFIG, SHAPES)
    assert scales.inputs == scales.cache == {}
    assert scales.weights.keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("file", "name", "value", "message"),
    [
        ("act", f"{Q}.activation_quanter", None, "q_proj.activation_quanter is missing"),
        ("weight", f"{UP}.weight_quanter", None, "up_proj.weight_quanter is missing"),
        ("cachekv", CACHE.format("v"), None, "cachev_matmul.activation_quanter is missing"),
        ("act", f"{Q}.activation_quanter", 0.0, "q_proj.activation_quanter holds 0.0"),
        ("act", f"{Q}.activation_quanter", -1, "q_proj.activation_quanter holds -"),
        ("act", f"{Q}.activation_quanter", 1e-44, "q_proj.activation_quanter holds 0.0"),
        ("act", f"{Q}.activation_quanter", float("nan"), "q_proj.activation_quanter holds nan"),
        ("act", f"{Q}.activation_quanter", True, "has 1 entries .* needed are 1 numbers"),
        ("act", f"{Q}.activation_quanter", "1", "needed are 1 numbers"),
        ("act", f"{Q}.activation_quanter.zero_point", 0, "zero_point is not expected"),
        ("weight", f"{Q}.weight_quanter", [1.0], "q_proj.weight_quanter has 1 entries"),
        ("weight", f"{Q}.weight_quanter", 1.0, "needed are 2 numbers.* fp8"),
        ("weight", f"{Q}.weight_quanter", [1.0, 0.0], "q_proj.weight_quanter holds 0.0"),
        ("weight", "llama.layers.1.mlp.up_proj.weight_quanter", [1.0], "layers.1.* not expected"),
        ("cachekv", CACHE.format("k"), [1.0, 1.0], "cachek_matmul.* has 2 entries .* are 4"),
        (
            "cachekv",
            CACHE.format("k"),
            [1.0, 2.0, 3.0, 3.0],
            "cachek.* differs between query heads",
        ),
        ("cachekv", CACHE.format("k"), [1.0, 1.0, -3.0, -3.0], "cachek_matmul.* holds -"),
        ("cachekv", CACHE.format("q"), [1.0] * 4, "cacheq_matmul.* is not expected"),
    ],
)
def test_what_does_not_fit_is_refused(file, name, value, message, write):
    tables = deepcopy(TABLES)
    tables[f"{file}_scales.json"].pop(name, None)
    if value is not None:
        tables[f"{file}_scales.json"][name] = value
    refused(message, read_paddle, write(tables), CONFIG, SHAPES)


def test_merged_inputs_have_one_scale(write):
    shapes = SHAPES | {"model.layers.0.mlp.gate_proj": (1, 3)}
    tables = deepcopy(TABLES)
    tables["act_scales.json"][f"{UP}.activation_quanter".replace("up", "gate")] = 63.0
    tables["weight_scales.json"][f"{UP}.weight_quanter".replace("up", "gate")] = [1.0]
    differ = "gate_proj and model.layers.0.mlp.up_proj differ"
    refused(differ, read_paddle, write(tables), CONFIG, shapes)
    tables["act_scales.json"][f"{UP}.activation_quanter".replace("up", "gate")] = 63.5
    read_paddle(write(tables), CONFIG, shapes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "act_scales.json").unlink(), "act_scales.json: no such file"),
        (lambda f: (f / "act_scales.json").write_text("{"), "act_scales.json: not JSON"),
        (lambda f: (f / "act_scales.json").write_text("[]"), "act_scales.json: not an object"),
    ],
)
def test_damaged_files_are_refused(change, message, write):
    folder = write(TABLES)
    change(folder)
    refused(message, read_paddle, folder, CONFIG, SHAPES)


def test_other_families_are_refused(write):
    other = CONFIG | {"model_type": "gemma"}
    refused("found model_type 'gemma'", read_paddle, write(TABLES), other, SHAPES)
