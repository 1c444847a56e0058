"""Caches as llm-compressor writes them: `kv_cache_scheme`, and scales among the served tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import KVCacheSpec
from inference.engine import Engine
from ptq.report.inspection import describe, inspect

IDS = list(range(3, 40))
SCHEME = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}
HEADS = {"strategy": "attn_head"}
INT = {"type": "int"}
A = "model.layers.1.self_attn"


def served(source: Path, out: Path, change: dict, shape: tuple[int, ...]) -> Path:
    """A checkpoint of ours without `quant/`, its cache told as others do, with bf16 scales."""
    scales = Checkpoint.open(source).kv_scales
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("quant"))
    tensors = load_file(out / "model.safetensors")
    for attention, pair in scales.items():
        for kind, scale in zip("kv", pair, strict=True):
            own = scale.bfloat16() if len(shape) == 3 else scale[:1].bfloat16()
            tensors[f"{attention}.{kind}_scale"] = own.reshape(shape).clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_bytes())
    config.pop("ptq", None)
    empty = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    quantization = config.get("quantization_config", empty)
    config["quantization_config"] = quantization | {"kv_cache_scheme": SCHEME | change}
    (out / "config.json").write_text(json.dumps(config))
    return out


def change_tensor(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("preset", "change", "shape", "spec"),
    [
        ("a8w8c8", INT | HEADS, (2, 1, 1), KVCacheSpec()),
        ("a8w8c8", INT, (1,), KVCacheSpec(granularity="per_tensor")),
        ("c8_fp8", {}, (1,), KVCacheSpec(dtype="fp8_e4m3", granularity="per_tensor")),
        ("fp8_c8", {}, (), KVCacheSpec(dtype="fp8_e4m3", granularity="per_tensor")),
        ("fp8_c8", HEADS, (2, 1, 1), KVCacheSpec(dtype="fp8_e4m3")),
    ],
)
def test_caches_that_run(preset, change, shape, spec, tiny_llama, make_quantized, tmp_path):
    source = make_quantized(tiny_llama, preset)
    folder = served(source, tmp_path / "served", change, shape)
    checkpoint, ours = Checkpoint.open(folder), Checkpoint.open(source)
    assert checkpoint.scheme == ours.scheme.model_copy(update={"kv_cache": spec})
    assert checkpoint.names() == ours.names()
    for attention, pair in ours.kv_scales.items():
        for found, scale in zip(checkpoint.kv_scales[attention], pair, strict=True):
            known = scale if len(shape) == 3 else scale[:1].expand(2)
            assert torch.equal(found, known.bfloat16().float())
    engine = Engine.from_pretrained(folder)
    assert engine.quantized_kv
    found, plain = engine.score(IDS), Engine.from_pretrained(folder, quantized_kv=False).score(IDS)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, plain)


def test_logits_are_those_of_our_own_checkpoint(tiny_llama, make_quantized, tmp_path):
    source = make_quantized(tiny_llama, "a8w8c8")
    folder = served(source, tmp_path / "served", INT | HEADS, (2, 1, 1))
    ours = Engine.from_pretrained(source)
    for pool in ours.pools:  # those were rounded to bf16
        for scale in (pool.k_scale, pool.v_scale):
            scale.copy_(scale.bfloat16().float())
    assert torch.equal(Engine.from_pretrained(folder).score(IDS), ours.score(IDS))
    lines = "\n".join(describe(inspect(Checkpoint.open(folder)), 1))
    assert "K cache: scales from" in lines
    assert "scales of the cache" in lines


@pytest.mark.parametrize(
    "change",
    [
        {"dynamic": True},
        {"num_bits": 4},
        {"symmetric": False},
        {"strategy": "channel"},
        {"strategy": "token", "dynamic": True},
        {"type": "int", "strategy": "tensor_group"},
    ],
)
def test_other_caches_are_refused_with_those_that_run(change, tiny_llama, make_quantized, tmp_path):
    folder = served(make_quantized(tiny_llama), tmp_path / "served", change, (1,))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    told = str(caught.value)
    assert "kv_cache_scheme" in told
    assert "Supported: caches in int8 or fp8 e4m3, symmetric and static, with scales per" in told


def test_scales_that_are_missing_extra_or_damaged_are_named(tiny_llama, make_quantized, tmp_path):
    source = make_quantized(tiny_llama)
    for i, (name, tensor, message) in enumerate(
        (
            (f"{A}.k_scale", None, f"kv_cache_scheme of config.json: {A}.k_scale: missing"),
            (f"{A}.k_scale", torch.ones(3), f"{A}.k_scale is torch.float32 \\(3,\\); needed is"),
            (f"{A}.v_scale", torch.zeros(1), f"{A}.v_scale holds 0.0; a scale is finite"),
            (f"{A}.v_zero_point", torch.ones(1), f"{A}.v_zero_point is not 0"),
            (f"{A}.q_scale", torch.ones(1), f"{A}.q_scale: not expected"),
        )
    ):
        folder = served(source, tmp_path / str(i), INT, (1,))
        change_tensor(folder, name, tensor)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(folder)
    folder = served(source, tmp_path / "zero", INT, (1,))
    change_tensor(folder, f"{A}.v_zero_point", torch.zeros(1, dtype=torch.int8))
    assert f"{A}.v_zero_point" not in Checkpoint.open(folder).names()
    shutil.copytree(source / "quant", folder / "quant")
    (folder / "quant" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="both say how the cache is quantized"):
        Checkpoint.open(folder)
