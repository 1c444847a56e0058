"""Any checkpoint as a float model: the values, what is told, what is refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from ptq.commands import convert as command
from ptq.convert.convert import convert
from tests.fake_quantized import dequantized
from tests.ptq.convert.foreign_folders import as_floats
from tests.ptq.quantizing import edit_config

UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "preset", ["w8", "a8w8c8", "a8w4", "w4c8", "fp8_tensor", "fp8_channel", "fp8_block", "c8_fp8"]
)
def test_every_scheme_becomes_a_float_model(preset, tiny_llama, make_quantized, tmp_path):
    source = Checkpoint.open(make_quantized(tiny_llama, preset))
    done = convert(source.path, tmp_path / "out", "float", dtype="float32", shard_bytes=200_000)
    found = Checkpoint.open(tmp_path / "out", verify=True)
    assert not found.scheme.quantizes_anything
    assert found.config == source.config | {"dtype": "float32"}
    assert set(found.names()) == set(Checkpoint.open(tiny_llama).names())
    for module in source.quantized_modules:
        assert torch.equal(found.tensor(f"{module}.weight"), dequantized(source, module))
    assert torch.equal(found.tensor("model.norm.weight"), source.tensor("model.norm.weight"))
    assert done.scale_rounding == 0.0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    told = "\n".join(done.notes)
    assert ("run in float now" in told) == (source.scheme.activations is not None)
    assert ("cache" in told) == (source.scheme.kv_cache is not None)


@pytest.mark.parametrize(
    ("preset", "target", "rtol"),
    [*(("w4", target, 2**-10) for target in ("gptq", "gptq_v2", "awq")), ("fp8_block",) * 2 + (0,)],
)
def test_foreign_layouts_become_the_same_model(
    preset, target, rtol, tiny_llama, make_quantized, tmp_path
):
    source = Checkpoint.open(make_quantized(tiny_llama, preset))
    convert(source.path, tmp_path / "foreign", target)
    found = as_floats(tmp_path / "foreign", tmp_path / "out").tensor(f"{UP}.weight")
    torch.testing.assert_close(found, dequantized(source, UP), rtol=rtol, atol=0)


def test_act_order_has_values(tiny_llama, make_quantized, tmp_path):
    """Groups of inputs in any order: no scheme of ours, but a float model."""
    folder = tmp_path / "gptq"
    convert(make_quantized(tiny_llama, "w4"), folder, "gptq")
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    plain = [f"{UP}.g_idx", f"{UP}.scales", f"{UP}.qzeros"]
    tensors[plain[0]] = (order // 64).int()
    for name in plain[1:]:
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    tensors[plain[1]][1] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = as_floats(folder, tmp_path / "out").tensor(f"{UP}.weight")
    once = dequantized(Checkpoint.open(make_quantized(tiny_llama, "w4")), UP)
    wanted = once * torch.where(order < 64, 1.0, 2.0)
    torch.testing.assert_close(found, wanted, rtol=2**-10, atol=0)


def test_the_type_is_the_models_or_the_one_asked_for(tiny_llama, make_quantized, tmp_path, capsys):
    source = make_quantized(tiny_llama, "w4")
    exact = dequantized(Checkpoint.open(source), UP)
    assert command.main([str(source), str(tmp_path / "bf16"), "--to", "float"]) == 0
    out = capsys.readouterr().out
    assert "a float model of 14 layers, weights rounded, by at most 0.00" in out
    assert "rounded to bfloat16; --dtype float32 keeps them exact" in out
    for name in ("bfloat16", "float16", "float32"):
        folder = tmp_path / name
        arguments = [str(source), str(folder), "--to", "float", "--dtype", name]
        assert command.main(arguments) == 0
        found = Checkpoint.open(folder)
        assert found.config["dtype"] == name
        assert torch.equal(found.tensor(f"{UP}.weight"), exact.to(getattr(torch, name)))
    assert "weights exact" in capsys.readouterr().out
    same = (tmp_path / "bf16" / "model.safetensors").read_bytes()
    assert (tmp_path / "bfloat16" / "model.safetensors").read_bytes() == same


def test_transformers_opens_it(tiny_llama, make_quantized, tmp_path):
    from transformers import AutoModelForCausalLM

    source = Checkpoint.open(make_quantized(tiny_llama, "w4c8"))
    convert(source.path, tmp_path / "out", "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    for module in source.quantized_modules:
        assert torch.equal(
            model.get_submodule(module).weight, dequantized(source, module).bfloat16()
        )
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_what_cannot_be_one_is_refused(tiny_llama, make_quantized, tmp_path):
    with pytest.raises(CheckpointError, match="is a float model already"):
        convert(tiny_llama, tmp_path / "out", "float")
    with pytest.raises(RequestError, match="--dtype goes with --to float, not with --to gptq"):
        convert(make_quantized(tiny_llama, "w4"), tmp_path / "out", "gptq", dtype="float32")
    source = shutil.copytree(make_quantized(tiny_llama, "w4"), tmp_path / "source")
    (source / "quant" / "manifest.json").unlink()
    edit_config(source, dtype="float64")
    with pytest.raises(CheckpointError, match="found dtype 'float64'; allowed: bfloat16, float16"):
        convert(source, tmp_path / "out", "float")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{UP}.weight_scale"] = torch.full_like(tensors[f"{UP}.weight_scale"], 1e5)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(source / "quant")
    with pytest.raises(CheckpointError, match=f"{UP}.weight holds NaN or infinity"):
        convert(source, tmp_path / "out", "float", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_it_can_be_quantized_again_to_the_same_integers(tiny_llama, make_quantized, tmp_path):
    """bf16 moves a weight by less than half a step of int8."""
    source = Checkpoint.open(make_quantized(tiny_llama, "a8w8c8"))
    convert(source.path, tmp_path / "tables", "paddle")
    convert(source.path, tmp_path / "float", "float")
    done = convert(
        tmp_path / "float", tmp_path / "back", "compressed_tensors", tables=tmp_path / "tables"
    )
    back = Checkpoint.open(tmp_path / "back", verify=True)
    assert done.rounded
    assert back.scheme == source.scheme
    for name in source.names():
        assert torch.equal(back.tensor(name), source.tensor(name)), name
