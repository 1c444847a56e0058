"""A part of a checkpoint is what is cut out of the whole, and no more of a file is read for it."""

import pytest
import torch

from formats.checkpoint.part import CheckpointPart, Cut, Span
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.stored import safetensors_files
from kernels.numerics import dequantize
from ptq.convert.convert import convert

BLOCK = "model.layers.0"
Q, DOWN = f"{BLOCK}.self_attn.q_proj", f"{BLOCK}.mlp.down_proj"
ROWS, COLUMNS = Span(32, 96), Span(128, 256)


def values(checkpoint, module):
    spec, weight = checkpoint.scheme_of(module).weights, checkpoint.weight(module)
    return dequantize(weight.q, weight.scale, weight.zero_point, spec.block)


def part_of(checkpoint):
    cuts = {Q: Cut(rows=ROWS), DOWN: Cut(columns=COLUMNS)}
    return CheckpointPart(checkpoint, cuts, {f"{BLOCK}.input_layernorm.weight": Span(3, 9)})


@pytest.mark.parametrize("scheme", ["a8w8c8", "w4", "fp8_channel", "fp8_tensor", "mxfp4", "nvfp4"])
def test_quantized_layers(scheme, tiny_llama, make_quantized):
    whole = Checkpoint.open(make_quantized(tiny_llama, scheme))
    part = part_of(whole)
    assert torch.equal(values(part, Q), values(whole, Q)[ROWS.slice])
    assert torch.equal(values(part, DOWN), values(whole, DOWN)[:, COLUMNS.slice])
    assert part.weight_shape(Q) == (64, 128)
    assert part.weight_shape(DOWN) == (128, 128)
    other = f"{BLOCK}.mlp.up_proj"
    assert torch.equal(values(part, other), values(whole, other))


def test_float_layers_biases_and_vectors(make_model):
    whole = Checkpoint.open(make_model("qwen2"))
    part = part_of(whole)
    for name, rows in ((f"{Q}.weight", ROWS), (f"{Q}.bias", ROWS)):
        assert torch.equal(part.tensor(name), whole.tensor(name)[rows.slice])
    columns = whole.tensor(f"{DOWN}.weight")[:, COLUMNS.slice]
    assert torch.equal(part.tensor(f"{DOWN}.weight"), columns)
    norm = f"{BLOCK}.input_layernorm.weight"
    assert torch.equal(part.tensor(norm), whole.tensor(norm)[3:9])


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_layers_of_other_software(layout, tiny_llama, make_quantized, tmp_path):
    convert(make_quantized(tiny_llama, "w4"), tmp_path / "out", layout)
    whole = Checkpoint.open(tmp_path / "out")
    part = part_of(whole)
    assert torch.equal(values(part, Q), values(whole, Q)[ROWS.slice])
    assert torch.equal(values(part, DOWN), values(whole, DOWN)[:, COLUMNS.slice])


@pytest.mark.parametrize(
    ("scheme", "cut", "told"),
    [
        ("w4", Cut(columns=Span(0, 64)), r"weight_scale .* every 128 .* 0 to 64"),
        ("fp8_block", Cut(rows=Span(64, 128)), r"weight_scale .* every 128 .* 64 to 128"),
    ],
)
def test_what_shares_a_scale_is_not_cut_apart(scheme, cut, told, tiny_llama, make_quantized):
    whole = Checkpoint.open(make_quantized(tiny_llama, scheme))
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.{told}"):
        CheckpointPart(whole, {DOWN: cut}, {})


def test_rows_are_read_alone(make_model, monkeypatch):
    """Of a layer's file, the bytes of its rows are read and no others."""
    part = part_of(Checkpoint.open(make_model("llama")))
    read, before = [], safetensors_files.read_elements

    def noted(files, names):
        found = before(files, names)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr("formats.stored.safetensors_files.read_elements", noted)
    assert part.tensor(f"{Q}.weight").shape == (64, 128)
    assert read == [64 * 128 * 2]
