"""Folders of bitsandbytes and neural-compressor, and PaddleNLP's tables, as checkpoints of ours."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from formats.scheme import PRESETS, Scheme, WeightSpec
from kernels.numerics import dequantize
from ptq.commands import convert as command
from ptq.convert.convert import convert
from tests.ptq.convert.foreign_folders import (
    INC_CONFIG,
    INT8_CONFIG,
    NF4_CONFIG,
    as_floats,
    inc_layer,
    int8_layer,
    make_folder,
    nf4_layer,
)
from tests.ptq.quantizing import edit_config

UP = "model.layers.1.mlp.up_proj"


def test_bitsandbytes_int8_is_taken_over(tiny_llama, tmp_path):
    source = make_folder(tiny_llama, tmp_path / "source", int8_layer, INT8_CONFIG)
    done = convert(source, tmp_path / "out", "compressed_tensors", shard_bytes=60_000)
    found = Checkpoint.open(tmp_path / "out", verify=True)
    assert found.scheme == PRESETS["w8"]
    tensors = load_file(source / "model.safetensors")
    for module in found.quantized_modules:
        weight = found.weight(module)
        assert torch.equal(weight.q, tensors[f"{module}.weight"])
        assert torch.equal(weight.scale, tensors[f"{module}.SCB"][:, None] / 127)
    assert done.modules == 14
    assert "bitsandbytes quantizes inputs, too" in done.notes[-1]


def test_nf4_becomes_a_float_model_only(tiny_llama, tmp_path):
    source = make_folder(tiny_llama, tmp_path / "source", nf4_layer, NF4_CONFIG)
    for target in ("compressed_tensors", "gptq", "paddle"):
        with pytest.raises(CheckpointError, match=f"ptq convert {source} FLOAT --to float"):
            convert(source, tmp_path / "out", target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(source, tmp_path / "out", "float", dtype="float32", shard_bytes=200_000)
    found, original = Checkpoint.open(tmp_path / "out"), Checkpoint.open(tiny_llama)
    assert set(found.names()) == set(original.names())
    for name in original.names():
        new, old = found.tensor(name).float(), original.tensor(name).float()
        if name.endswith("_proj.weight"):  # half of the widest distance, 0.31 of the magnitude
            largest = old.reshape(-1, 64).abs().amax(dim=1, keepdim=True)
            assert ((new - old).reshape(-1, 64).abs() <= 0.17 * largest).all()
            assert (new - old).norm() < 0.12 * old.norm()
        else:
            assert torch.equal(new, old)


def test_neural_compressor_loses_the_biases_that_it_made_up(make_model, tiny_llama, tmp_path):
    source = make_folder(tiny_llama, tmp_path / "llama", inc_layer, INC_CONFIG)
    convert(source, tmp_path / "out", "compressed_tensors")
    found = Checkpoint.open(tmp_path / "out", verify=True)
    spec = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)
    assert found.scheme == Scheme(weights=spec)
    assert not [name for name in found.names() if name.endswith("bias")]
    weight = found.weight(UP)
    back = dequantize(weight.q, weight.scale, weight.zero_point, spec.block)
    old = Checkpoint.open(tiny_llama).tensor(f"{UP}.weight").float()
    step = weight.scale.repeat_interleave(32, dim=1)
    assert ((back - old).abs() <= step * 0.51).all()
    floats = as_floats(source, tmp_path / "float")
    assert set(floats.names()) == set(Checkpoint.open(tiny_llama).names())
    assert torch.equal(floats.tensor(f"{UP}.weight"), back)


def test_zero_biases_that_the_model_has_are_kept(make_model, tmp_path):
    qwen = make_model("qwen2")
    source = make_folder(qwen, tmp_path / "qwen2", inc_layer, INC_CONFIG)
    convert(source, tmp_path / "out", "compressed_tensors")
    found = [name for name in Checkpoint.open(tmp_path / "out").names() if name.endswith("bias")]
    assert found == [name for name in Checkpoint.open(qwen).names() if name.endswith("bias")]
    edit_config(source, model_type="nonesuch")
    with pytest.raises(CheckpointError, match="transformers makes no model of it .*bias belongs"):
        convert(source, tmp_path / "other", "compressed_tensors")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_is_not_kept_twice(same, tiny_llama, tmp_path):
    source = make_folder(tiny_llama, tmp_path / "source", inc_layer, INC_CONFIG)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else 2)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for target in ("compressed_tensors", "float"):
        convert(source, tmp_path / target, target)
        assert ("lm_head.weight" in Checkpoint.open(tmp_path / target)) != same


@pytest.fixture(scope="module")
def exported(tiny_llama, make_quantized, tmp_path_factory):
    """Factory of our exports of a preset: the checkpoint, its tables."""
    made: dict[str, Path] = {}

    def make(preset: str) -> tuple[Checkpoint, Path]:
        if preset not in made:
            made[preset] = tmp_path_factory.mktemp("tables") / preset
            convert(make_quantized(tiny_llama, preset), made[preset], "paddle")
        return Checkpoint.open(make_quantized(tiny_llama, preset)), made[preset]

    return make


@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8", "w8", "c8"])
def test_tables_out_and_in_are_the_same_checkpoint(preset, exported, tiny_llama, tmp_path):
    source, tables = exported(preset)
    done = convert(tiny_llama, tmp_path / "out", "compressed_tensors", tables=tables)
    found = Checkpoint.open(tmp_path / "out", verify=True)
    assert found.scheme == source.scheme
    assert found.names() == source.names()
    for name in source.names():
        assert torch.equal(found.tensor(name), source.tensor(name)), name
    for attention, pair in source.kv_scales.items():
        for new, old in zip(found.kv_scales[attention], pair, strict=True):
            assert torch.equal(new, old)
    assert done.rounded == (preset != "c8")
    assert len(done.notes) == 1
    convert(tmp_path / "out", tmp_path / "again", "paddle")
    for file in tables.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_tables_over_int8_weights_keep_the_integers(exported, make_quantized, tiny_llama, tmp_path):
    source, tables = exported("a8w8c8")
    weights = make_quantized(tiny_llama, "a8w8_dynamic")
    done = convert(weights, tmp_path / "out", "compressed_tensors", tables=tables)
    found = Checkpoint.open(tmp_path / "out", verify=True)
    assert found.scheme == source.scheme
    assert not done.rounded
    for module in source.quantized_modules:
        assert torch.equal(found.weight(module).q, source.weight(module).q)
        assert torch.equal(found.weight(module).scale, source.weight(module).scale)


def test_searched_scales_come_back_bit_for_bit(make_quantized, tiny_llama, tmp_path):
    """Scales that are no quotient of a largest magnitude, as a search of the range gives."""
    source = shutil.copytree(make_quantized(tiny_llama, "a8w8"), tmp_path / "source")
    shutil.rmtree(source / "quant")
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] *= 0.8 + 0.2 * torch.rand(tensors[name].shape, generator=generator)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "tables", "paddle")
    convert(source, tmp_path / "out", "compressed_tensors", tables=tmp_path / "tables")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_scale_table_tells_what_the_tables_cost(exported, tiny_llama, tmp_path, capsys):
    _, tables = exported("a8w8")
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    for file in tables.iterdir():
        table = json.loads(file.read_bytes())
        name = f"llama.{UP.removeprefix('model.')}.weight_quanter"
        if name in table:
            table[name] = [value / 4 for value in table[name]]
        (narrow / file.name).write_text(json.dumps(table))
    arguments = [str(tiny_llama), str(tmp_path / "out"), "--to", "compressed_tensors"]
    assert command.main([*arguments, "--tables", str(narrow)]) == 0
    out = capsys.readouterr().out
    assert "14 layers, rounded to the nearest with given scales" in out
    assert f"Weights of {UP} reach 4 times the range of their scale and were cut" in out
    table = Checkpoint.open(tmp_path / "out").scale_table
    assert table is not None
    cut, whole = table.get(UP, "weight"), table.get(UP.replace("up", "gate"), "weight")
    assert cut is not None
    assert whole is not None
    assert 0.3 < cut.clip_fraction < 0.9
    assert whole.clip_fraction == 0.0
    assert cut.sqnr_db is not None
    assert whole.sqnr_db is not None
    assert cut.sqnr_db < 20 < whole.sqnr_db


def test_tables_that_do_not_go_with_the_model_are_refused(
    exported, make_quantized, tiny_llama, tmp_path
):
    _, tables = exported("a8w8c8")
    with pytest.raises(RequestError, match="--tables goes with --to compressed_tensors"):
        convert(tiny_llama, tmp_path / "out", "float", tables=tables)
    source = make_quantized(tiny_llama, "w4")
    with pytest.raises(CheckpointError, match="found int4 weights group of 128; PaddleNLP's"):
        convert(source, tmp_path / "out", "compressed_tensors", tables=tables)
    other = tmp_path / "other"
    other.mkdir()
    for file in tables.iterdir():
        (other / file.name).write_text("{}")
    with pytest.raises(CheckpointError, match="all three tables are empty"):
        convert(tiny_llama, tmp_path / "out", "compressed_tensors", tables=other)
    (other / "act_scales.json").write_bytes((tables / "act_scales.json").read_bytes())
    with pytest.raises(CheckpointError, match="weight_scales.json is empty, but inputs are"):
        convert(tiny_llama, tmp_path / "out", "compressed_tensors", tables=other)
    changed = json.loads((tables / "weight_scales.json").read_bytes())
    (other / "weight_scales.json").write_text(
        json.dumps({name: [2 * value for value in row] for name, row in changed.items()})
    )
    with pytest.raises(CheckpointError, match="scales of .* are not those of .*int8 already"):
        convert(
            make_quantized(tiny_llama, "w8"), tmp_path / "out", "compressed_tensors", tables=other
        )
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
