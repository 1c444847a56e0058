"""Folders as other software writes them, made of a tiny model without that software."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.foreign.gptq import pack_gptq
from formats.pack import pack_words, unpack_words
from formats.scheme import PRESETS, WeightSpec
from formats.stored.weights import StoredWeight, weight_tensors
from inference.engine import Engine
from ptq.convert.convert import convert
from ptq.methods.common.rounding import round_weight
from tests.families import distance

IDS = list(range(3, 40))
NF4 = [-1.0, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0]
NF4 += [0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True}
NF4_CONFIG = BNB | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT8_CONFIG = BNB | {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "provider": "auto-round",
}
AUTO_ROUND_CONFIG = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
}
INC_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "desc_act": False,
    "damp_percent": 0,
    "model_file_base_name": "model",
}


def make_folder(
    model: Path,
    out: Path,
    layer: Callable[[Tensor], dict[str, Tensor]],
    quantization: dict | None,
    others: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] | None = None,
) -> Path:
    """A copy of a model whose linear layers are what `layer` makes of their weights.

    Args:
        model: Its folder.
        out: Folder to make.
        layer: Makes the tensors of a layer, by their leaf.
        quantization: The `quantization_config`; None for none.
        others: Makes those of the layers whose names end so.
    """
    shutil.copytree(model, out)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(out / "model.safetensors").items():
        module = name.removesuffix(".weight")
        own = [make for end, make in (others or {}).items() if module.endswith(end)]
        make = next(iter(own), layer)
        made = make(tensor.float()) if module.endswith("_proj") else {"": tensor}
        tensors |= {f"{module}.{leaf}" if leaf else name: new for leaf, new in made.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((out / "config.json").read_bytes())
    own = {} if quantization is None else {"quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config | own))
    return out


def logits(folder: Path) -> Tensor:
    """What the engine gives after each of `IDS`."""
    return Engine.from_pretrained(folder).score(IDS)


def as_floats(folder: Path, out: Path) -> Checkpoint:
    """The float model in fp32 that a folder becomes."""
    convert(folder, out, "float", dtype="float32")
    return Checkpoint.open(out)


def stays(found: Tensor, folder: Path, out: Path, within: float) -> Checkpoint:
    """Logits are those of the folder's checkpoint of ours, and of its float model `within`."""
    floats = as_floats(folder, out / "float")
    assert distance(found, logits(out / "float")) < within
    convert(folder, out / "ours", "compressed_tensors")
    assert torch.equal(logits(out / "ours"), found)
    return floats


def lost(found: Checkpoint, model: Path, module: str) -> float:
    """Relative distance of a weight from the model's."""
    name = f"{module}.weight"
    return distance(found.tensor(name), Checkpoint.open(model).tensor(name).float())


def int8_layer(weight: Tensor) -> dict[str, Tensor]:
    """LLM.int8: rows scaled to 127."""
    largest = weight.abs().amax(dim=1)
    return {
        "weight": (weight * (127 / largest)[:, None]).round().to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def nf4_layer(weight: Tensor) -> dict[str, Tensor]:
    """Codes of the nearest value in blocks of 64, magnitudes quantized in blocks of 256."""
    rows, columns = weight.shape
    codes, blocks = torch.tensor(NF4), weight.reshape(-1, 64)
    largest = blocks.abs().amax(dim=1)
    nearest = (blocks / largest[:, None])[..., None].sub(codes).abs().argmin(-1).flatten()
    offset = largest.mean()
    parts = (largest - offset).reshape(-1, min(256, len(largest)))
    nested = parts.abs().amax(dim=1)
    steps = (parts / nested[:, None] * 127 + 128).round().flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    text = json.dumps(state).encode()
    return {
        "weight": (nearest[::2] * 16 + nearest[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": steps.to(torch.uint8),
        "weight.quant_map": codes,
        "weight.nested_absmax": nested,
        "weight.nested_quant_map": (torch.arange(256.0) - 128) / 127,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def inc_layer(weight: Tensor) -> dict[str, Tensor]:
    """neural-compressor: GPTQ's words, no g_idx, a placeholder, and a bias of zeros."""
    spec = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)
    made = pack_gptq(round_weight(weight, spec, torch.float16), 32, 4)
    del made["g_idx"]
    return made | {
        "scale_bf16_to_fp8": torch.zeros(1, dtype=torch.bfloat16),
        "bias": torch.zeros(len(weight)),
    }


def auto_round_layer(weight: Tensor, group_size: int = 32) -> dict[str, Tensor]:
    """AutoRound, symmetric, as GPTQ's words: the largest magnitude of a group becomes -8."""
    groups = weight.unflatten(1, (-1, group_size))  # [N, groups, size]
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (extreme / -8).half()
    q = (groups / scale.float()).round().clamp(-8, 7).to(torch.int8).flatten(1)
    plain = pack_gptq(StoredWeight(q, scale.float().abs().squeeze(2)), group_size, 4)
    del plain["g_idx"]
    return plain | {"scales": scale.squeeze(2).T.contiguous()}


def nvfp4_layer(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' NVFP4."""
    scheme = PRESETS["nvfp4"]
    assert scheme.weights is not None
    stored = round_weight(weight, scheme.weights, torch.float32)
    return weight_tensors(scheme, stored, torch.float32)


def bit_stream(values: Tensor, bits: int) -> Tensor:
    """Words of unsigned values one after the other, whatever the borders of words, by rows."""
    places = values.int()[..., None] >> torch.arange(bits) & 1
    stream = places.flatten(1).unflatten(1, (-1, 32)).long() << torch.arange(32)
    return stream.sum(-1).to(torch.uint32).view(torch.int32)


def few_bits_layer(bits: int, group_size: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """GPTQ of any number of bits, as `bit_stream` packs them."""

    def layer(weight: Tensor) -> dict[str, Tensor]:
        groups, top = weight.unflatten(1, (-1, group_size)), (1 << bits) - 1
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / top).half().float()
        zeros = (-low / scale).round().clamp(1, top)
        q = (groups / scale[..., None]).round().add(zeros[..., None]).clamp(0, top).flatten(1)
        inputs = torch.arange(weight.shape[1], dtype=torch.int32)
        return {
            "qweight": bit_stream(q, bits).T.contiguous(),
            "qzeros": bit_stream(zeros.T - 1, bits),
            "scales": scale.half().T.contiguous(),
            "g_idx": inputs // group_size,
        }

    return layer


def turn_inputs(folder: Path, out: Path, *, alike: bool = True) -> Path:
    """A GPTQ folder with act-order: inputs of each layer in groups of no order.

    Args:
        folder: Without act-order, of one file.
        out: Folder to make.
        alike: Whether layers that share an input have the same groups, as GPTQ makes them.
    """
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("g_idx")]:
        module, inputs = name.removesuffix(".g_idx"), len(tensors[name])
        block, leaf = module.rsplit(".", 2)[0], module.rpartition(".")[2]
        shared = leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        seed = sum(f"{block} {inputs if alike and shared else leaf}".encode())
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        q = unpack_words(tensors[f"{module}.qweight"].T, 4, inputs)
        turned = torch.empty_like(q)
        turned[:, order] = q
        tensors[f"{module}.qweight"] = pack_words(turned, 4).T.contiguous()
        g_idx = tensors[name].clone()
        tensors[name][order] = g_idx
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
