"""Damaged folders of other software: one error that names the tensor, and nothing left behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.foreign.awq import awq_config
from formats.foreign.fp8 import fp8_block_config
from formats.scheme import WeightSpec
from ptq.convert.convert import convert
from tests.ptq.convert.foreign_folders import (
    AUTO_ROUND_CONFIG,
    GPTQ_CONFIG,
    INC_CONFIG,
    INT8_CONFIG,
    NF4_CONFIG,
    inc_layer,
    int8_layer,
    make_folder,
    nf4_layer,
)

UP = "model.layers.1.mlp.up_proj"
STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"
LAYERS = {
    "int8": (int8_layer, INT8_CONFIG),
    "nf4": (nf4_layer, NF4_CONFIG),
    "inc": (inc_layer, INC_CONFIG),
}


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory):
    """Good folders by kind."""
    root = tmp_path_factory.mktemp("good")
    return {kind: make_folder(tiny_llama, root / kind, *how) for kind, how in LAYERS.items()}


def refused(source: Path, out: Path, *words: str) -> None:
    for target in ("float", "compressed_tensors"):
        if target == "compressed_tensors" and "nf4" in source.name:
            continue
        with pytest.raises(CheckpointError) as caught:
            convert(source, out, target)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert len(str(caught.value)) < 700
    assert [path.name for path in out.parent.iterdir()] == [source.name]


def replace_text(tensor: torch.Tensor, old: bytes, new: bytes) -> torch.Tensor:
    text = bytes(tensor.tolist())
    assert old in text
    return torch.tensor(list(text.replace(old, new)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "name", "change", "words"),
    [
        ("int8", f"{UP}.SCB", None, (f"{UP}.weight", "not expected")),
        ("int8", f"{UP}.SCB", lambda t: t[:-1], (f"{UP}: SCB is", "(255,)", "(256,)")),
        ("int8", f"{UP}.SCB", lambda t: -t, (f"{UP}: SCB holds -",)),
        ("int8", f"{UP}.weight_format", None, (f"{UP}.weight_format is missing",)),
        ("int8", f"{UP}.weight_format", lambda t: t + 2, (f"{UP}: weight_format is not 0",)),
        ("nf4", f"{UP}.weight.nested_absmax", None, (f"{UP}.weight.nested_absmax is missing",)),
        ("nf4", f"{UP}.weight.absmax", None, (f"{UP}.weight.absmax is missing",)),
        ("nf4", f"{UP}.weight.absmax", lambda t: t[1:], (f"{UP}: weight.absmax is",)),
        ("nf4", STATE, lambda t: t[:40], (f"{STATE.replace('proj.', 'proj: ')}: its JSON",)),
        (
            "nf4",
            STATE,
            lambda t: replace_text(t, b'"nf4"', b'"nf3"'),
            (f"{UP}: weight.quant_state", "quant_type", "'nf4' or 'fp4'"),
        ),
        ("nf4", f"{UP}.weight", lambda t: t[:-1], (f"{UP}: weight has 16383 bytes", "16384")),
        ("inc", f"{UP}.qzeros", lambda t: t[:, 1:], (f"{UP}: qzeros is",)),
        ("inc", f"{UP}.scales", None, (f"{UP}.scales is missing",)),
        ("inc", f"{UP}.scale_bf16_to_fp8", lambda t: t + 1, (f"{UP}: scale_bf16_to_fp8 is 1",)),
    ],
)
def test_damaged_layers(kind, name, change, words, folders, tmp_path):
    source = shutil.copytree(folders[kind], tmp_path / kind)
    tensors = load_file(source / "model.safetensors")
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = change(old).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refused(source, tmp_path / "out", *words)


def test_a_type_that_the_config_does_not_know(folders, tmp_path):
    source = shutil.copytree(folders["nf4"], tmp_path / "nf4")
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (source / "config.json").write_text(json.dumps(config))
    refused(source, tmp_path / "out", "nf4", "fp4")


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_a_truncated_file(kind, folders, tmp_path):
    source = shutil.copytree(folders[kind], tmp_path / kind)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(source, tmp_path / "out", "model.safetensors", "not a whole safetensors file")


def test_neural_compressors_pickle(folders, tmp_path):
    source = tmp_path / "pickle"
    source.mkdir()
    for name in ("qconfig.json", "quantized_weight.pt"):
        (source / name).write_text("not read")
    refused(source, tmp_path / "out", "is a pickle", 'format="huggingface"')


def test_e5m2_is_named(tiny_llama, make_quantized, tmp_path):
    """As weights of a quantized folder, as plain weights, and in the settings alone."""
    for preset, target in (("fp8_block", "fp8_block"), ("fp8_channel", None)):
        source = make_quantized(tiny_llama, preset)
        folder = tmp_path / preset
        if target is None:
            shutil.copytree(source, folder)
        else:
            convert(source, folder, target)
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].float().to(torch.float8_e5m2)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for new in ("float", "compressed_tensors", "gptq"):
            with pytest.raises(CheckpointError, match=f"{UP}.weight is float8_e5m2, .* not run"):
                convert(folder, tmp_path / "out", new)
        with pytest.raises(CheckpointError, match=f"{UP}.weight is float8_e5m2"):
            Checkpoint.open(folder)
    convert(make_quantized(tiny_llama, "fp8_block"), tmp_path / "config", "fp8_block")
    config = json.loads((tmp_path / "config" / "config.json").read_bytes())
    config["quantization_config"]["fmt"] = "e5m2"
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="fmt 'e5m2'; allowed: 'e4m3', absent. e5m2 is not"):
        convert(tmp_path / "config", tmp_path / "out", "float")
    assert not (tmp_path / "out").exists()


ODD = (None, True, -3, 1.5, "x", [], [5], {}, {"x": 5}, 1 << 70, float("nan"))
SETTINGS = {
    "gptq": GPTQ_CONFIG | {"dynamic": {}, "checkpoint_format": "gptq"},
    "auto-round": AUTO_ROUND_CONFIG | {"extra_config": {}, "act_bits": 16},
    "awq": awq_config(WeightSpec(dtype="int4", granularity="group", group_size=32)),
    "fp8": fp8_block_config(),
    "int8": INT8_CONFIG,
    "nf4": NF4_CONFIG,
    "cache": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_odd_settings_are_one_clear_error(kind, tiny_llama, tmp_path):
    """Each setting in turn with a value of another type or range: refused, or not heeded."""
    source = shutil.copytree(tiny_llama, tmp_path / "source")
    config = json.loads((source / "config.json").read_bytes())
    settings = SETTINGS[kind]
    changed = [settings | {key: odd} for key in settings for odd in ODD]
    if kind == "cache":
        scheme = settings["kv_cache_scheme"]
        inner = [scheme | {key: odd} for key in (*scheme, "dynamic", "symmetric") for odd in ODD]
        changed += [settings | {"kv_cache_scheme": one} for one in inner]
    for quantization in changed:
        (source / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization})
        )
        with pytest.raises(CheckpointError) as caught:  # of float weights nothing is quantized
            Checkpoint.open(source)
        assert len(str(caught.value)) < 700
