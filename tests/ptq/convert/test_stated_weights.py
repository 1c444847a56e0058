"""Weights of compressed-tensors that no kernel takes, and fp8 by whatever names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.pack import pack_words
from formats.scheme import PRESETS
from ptq.convert.convert import convert
from tests.formats.published.test_with_images import write_both
from tests.ptq.convert.foreign_folders import (
    as_floats,
    bit_stream,
    logits,
    lost,
    make_folder,
    nvfp4_layer,
    stays,
)
from tests.refusals import refused_checkpoint
from tests.tiny_families import TINY

GATE = "model.layers.1.mlp.gate_proj"
TOKEN = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False}


def settings(weights: dict, layout: str = "pack-quantized", **group: Any) -> dict[str, Any]:
    own = {"targets": ["Linear"], "weights": weights, "format": layout} | group
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": own},
        "ignore": ["lm_head"],
    }


def stream(q: Tensor, bits: int) -> Tensor:
    return pack_words(q, bits) if bits in (4, 8) else bit_stream(q.int() + (1 << (bits - 1)), bits)


class Layers:
    """Makes layers of integers in groups, and keeps what they stand for."""

    def __init__(
        self, bits: int, size: int, *, symmetric: bool = True, order: bool = False
    ) -> None:
        self.bits, self.size, self.symmetric, self.order = bits, size, symmetric, order
        self.values: list[Tensor] = []

    def __call__(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        size, top = self.size if self.size > 0 else columns, (1 << (self.bits - 1)) - 1
        g_idx = torch.arange(columns) // size
        if self.order:
            g_idx = g_idx[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        scale = torch.stack(
            [weight[:, g_idx == g].abs().amax(1) / top for g in range(columns // size)], 1
        ).bfloat16()
        zeros = torch.arange(rows * scale.shape[1]).reshape(scale.shape) % 3 - 1
        zeros = zeros * (0 if self.symmetric else 1)
        q = (weight / scale.float()[:, g_idx] + zeros[:, g_idx]).round().clamp(-top - 1, top)
        self.values.append((q - zeros[:, g_idx]) * scale.float()[:, g_idx])
        made = {
            "weight_packed": stream(q.to(torch.int8), self.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if self.order:
            made["weight_g_idx"] = g_idx.int()
        if not self.symmetric:
            made["weight_zero_point"] = stream(zeros.T.to(torch.int8), self.bits).T.contiguous()
        return made


def becomes(folder: Path, out: Path, values: list[Tensor], words: str) -> None:
    """The folder is refused by name, and its float model has exactly some values."""
    refused_checkpoint(f"{words}.*convert CHECKPOINT FLOAT --to float", Checkpoint.open, folder)
    made = as_floats(folder, out)
    names = [n for n in load_file(folder / "model.safetensors") if n.endswith("_proj.weight_scale")]
    names = sorted(name.removesuffix("_scale") for name in names)
    found = {tuple(t.flatten()[:50].tolist()): t for t in map(made.tensor, names)}
    for value in values:
        own = found[tuple(value.flatten()[:50].tolist())]
        assert torch.equal(own, value)
    assert len(values) == len(names) == 14
    assert torch.isfinite(logits(out)).all()


@pytest.mark.parametrize(
    ("layers", "change", "group", "words"),
    [
        (Layers(4, 32, order=True), {"actorder": "group"}, {}, r"group_0.weights.actorder 'group'"),
        (Layers(4, 64, order=True, symmetric=False), {"actorder": "dynamic"}, {}, "actorder"),
        (Layers(4, 16), {}, {}, "group_0.weights.group_size 16 for int4"),
        (Layers(8, 128), {"group_size": 256}, {}, "group_size 256 for int8"),
        (Layers(3, 32), {}, {}, "group_0.weights.num_bits 3"),
        (Layers(5, -1), {"strategy": "channel"}, {}, "num_bits 5"),
        (
            Layers(4, 32, symmetric=False),
            {},
            {"input_activations": TOKEN},
            "input_activations.symm",
        ),
        (Layers(4, 32), {}, {"output_activations": TOKEN}, "group_0.output_activations"),
        (Layers(8, 32), {}, {"input_activations": TOKEN | {"symmetric": True}}, "use per_channel"),
    ],
)
def test_integers_that_no_kernel_takes(layers, change, group, words, make_model, tmp_path):
    size = change.get("group_size", layers.size)
    layers = Layers(layers.bits, size, symmetric=layers.symmetric, order=layers.order)
    args = INT | {"num_bits": layers.bits, "group_size": size, "symmetric": layers.symmetric}
    model = make_model("llama", hidden_size=256, head_dim=64)
    folder = make_folder(model, tmp_path / "source", layers, settings(args | change, **group))
    becomes(folder, tmp_path / "float", layers.values, words)


def fp4_layer(weight: Tensor) -> dict[str, Tensor]:
    return nvfp4_layer(weight) | {"input_global_scale": torch.tensor([300.0])}


def test_fp4_with_inputs_in_fp4(tiny_llama, tmp_path):
    """NVFP4 W4A4, as llm-compressor writes it, has the weights of NVFP4 alone."""
    inputs = FP4 | {"dynamic": "local"}
    config = settings(FP4, "nvfp4-pack-quantized", input_activations=inputs)
    folder = make_folder(tiny_llama, tmp_path / "source", fp4_layer, config)
    alone = make_folder(
        tiny_llama,
        tmp_path / "alone",
        nvfp4_layer,
        settings(FP4, "nvfp4-pack-quantized"),
    )
    refused_checkpoint("group_0.input_activations.*--to float", Checkpoint.open, folder)
    a, b = (as_floats(source, tmp_path / f"{source.name}_float") for source in (folder, alone))
    assert a.names() == b.names()
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names())


def test_scales_of_a_cache_are_left_out(tiny_llama, tmp_path):
    layers = Layers(4, 16)
    config = settings(INT | {"group_size": 16})
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    folder = make_folder(tiny_llama, tmp_path / "source", layers, config)
    tensors = load_file(folder / "model.safetensors")
    for i in range(2):
        tensors |= {f"model.layers.{i}.self_attn.{k}_scale": torch.ones(1) for k in "kv"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    becomes(folder, tmp_path / "float", layers.values, "group_size 16")


@pytest.mark.parametrize(
    ("key", "value"),
    [("transform_config", {"u": {}}), ("sparsity_config", {"format": "sparse-24-bitmask"})],
)
def test_what_is_no_plain_arithmetic_is_named(key, value, tiny_llama, tmp_path):
    config = settings(INT | {"group_size": 16}) | {key: value}
    folder = make_folder(tiny_llama, tmp_path / "source", Layers(4, 16), config)
    for run in (Checkpoint.open, lambda path: convert(path, tmp_path / "float", "float")):
        refused_checkpoint(key, run, folder)


FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
BLOCKS = FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(weight: Tensor, dtype: torch.dtype, size: int = 128) -> dict[str, Tensor]:
    """Blocks whose scales are powers of two."""
    rows, columns = -(-weight.shape[0] // size), -(-weight.shape[1] // size)
    scale = torch.empty(rows, columns)
    q = torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            own = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = torch.exp2((weight[own].abs().max() / 448).log2().ceil())
            q[own] = weight[own] / scale[i, j]
    return {"weight": q.to(torch.float8_e4m3fn), "weight_scale_inv": scale.to(dtype)}


def values(folder: Path, module: str) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    (scale,) = [tensors[n] for n in tensors if n.startswith(f"{module}.weight_scale")]
    q, scale = tensors[f"{module}.weight"].float(), scale.float()
    if scale.dim() == 2 and len(scale) != len(q):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(q), : q.shape[1]]
    return q * (scale.reshape(-1, 1) if scale.dim() == 1 else scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_whose_scales_are_powers_of_two(dtype, tiny_llama, tmp_path):
    """DeepSeek-V3.1's, in any type that holds powers of two."""
    config = BLOCKS | {"scale_fmt": "ue8m0"}
    folder = make_folder(tiny_llama, tmp_path / "source", lambda w: blocks(w, dtype), config)
    plain = make_folder(tiny_llama, tmp_path / "plain", lambda w: blocks(w, torch.float32), BLOCKS)
    floats = stays(logits(plain), folder, tmp_path, 0.15)
    assert torch.equal(logits(folder), logits(plain))
    assert torch.equal(floats.tensor(f"{GATE}.weight"), values(folder, GATE))


def test_blocks_of_another_size_become_a_float_model(tiny_llama, tmp_path):
    config = BLOCKS | {"weight_block_size": [64, 64]}
    folder = make_folder(
        tiny_llama, tmp_path / "source", lambda w: blocks(w, torch.float32, 64), config
    )
    refused_checkpoint(r"weight_block_size \[64, 64\].*--to float", Checkpoint.open, folder)
    assert lost(as_floats(folder, tmp_path / "float"), tiny_llama, GATE) < 0.05


def whole(weight: Tensor, names: tuple[str, ...], shape: tuple[int, ...], dtype=torch.bfloat16):
    """One scale a tensor, or one an output; with a second name, a scale of the inputs."""
    rows = shape and shape[0] == -1
    scale = (weight.abs().amax(1) if rows else weight.abs().max()) / 448
    scale = scale.to(dtype).reshape(shape)
    tensors = {"weight": (weight / scale.float().reshape(-1, 1)).clamp(-448, 448)}
    tensors = {"weight": tensors["weight"].to(torch.float8_e4m3fn), names[0]: scale}
    if len(names) > 1:
        tensors[names[1]] = torch.tensor(0.01 + 1e-4 * len(weight)).to(dtype).reshape(shape)
    return tensors


@pytest.mark.parametrize(
    ("names", "shape", "preset"),
    [
        (("weight_scale_inv", "activation_scale"), (), "fp8_tensor"),
        (("weight_scale", "input_scale"), (), "fp8_tensor"),
        (("weight_scale", "input_scale"), (1,), "fp8_tensor"),
        (("weight_scale_inv",), (), "fp8_channel"),
        (("weight_scale",), (1,), "fp8_channel"),
        (("weight_scale",), (-1, 1), "fp8_channel"),
    ],
)
def test_fp8_without_blocks(names, shape, preset, tiny_llama, tmp_path):
    config = FP8 | {"activation_scheme": "static" if len(names) > 1 else "dynamic"}
    folder = make_folder(tiny_llama, tmp_path / "source", lambda w: whole(w, names, shape), config)
    assert Checkpoint.open(folder).scheme == PRESETS[preset]
    floats = stays(logits(folder), folder, tmp_path, 0.15)
    assert torch.equal(floats.tensor(f"{GATE}.weight"), values(folder, GATE))


@pytest.mark.parametrize("text", ["ministral3", "mistral"])
def test_the_text_of_an_fp8_model_of_images(text, tmp_path):
    """Ministral 3's: names of the model of images, scalars beside each weight of the text."""
    own = TINY.get(text, {"sliding_window": None})
    write_both(tmp_path / "model", "mistral3", own | {"model_type": text}, "pixtral")
    names = ("weight_scale_inv", "activation_scale")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model/model.safetensors").items():
        inside = "language_model" in name and name.endswith("_proj.weight")
        made = whole(tensor, names, ()) if inside else {"weight": tensor}
        tensors |= {f"{name.removesuffix('weight')}{leaf}": t for leaf, t in made.items()}
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"] = FP8 | {
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.scheme == PRESETS["fp8_tensor"]
    assert len(checkpoint.quantized_modules) == 14
    stays(logits(tmp_path / "model"), tmp_path / "model", tmp_path, 0.15)
