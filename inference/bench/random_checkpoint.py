"""Checkpoints of random weights: the speed of a shape and a scheme without the model.

Weights are Gaussian and seeded, norms are ones, biases zeros; quantized layers are rounded to
nearest. Static scales of inputs and of the cache are one constant. The tokens of such a model mean
nothing, its times are those of a real one. Tensors are made and written one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from formats.checkpoint.folder import read_config
from formats.checkpoint.split import split_shapes
from formats.checkpoint.weights import StoredWeight, storage_format
from formats.checkpoint.write import CheckpointWriter
from formats.errors import RequestError
from formats.families.family import heads_of
from formats.families.names import HEAD, is_projection
from formats.families.registry import MODEL_TYPES, attention_names, find_family
from formats.scale_table import Role, ScaleEntry, ScaleTable
from formats.scheme import PRESETS, ActivationSpec, LayerScheme, Scheme
from kernels.numerics import (
    TYPES,
    block_absmax,
    block_view,
    choose_affine,
    choose_scale,
    pad_to_blocks,
    quantize,
)
from kernels.two_level import choose_unit, nearest_multiples

SEED, DEVIATION = 0, 0.02
ABSMAX = 4.0  # of inputs and of cached K and V, where their scale is static
SHARD_BYTES = 256 << 20
ROLES: tuple[Literal["k_cache"], Literal["v_cache"]] = ("k_cache", "v_cache")
HEAD_SCHEME = PRESETS["a8w8_dynamic"].of_layers
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1.1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def read_shape(text: str) -> tuple[str, dict[str, Any]]:
    """Name and config.json of a shape.

    Args:
        text: One of `SHAPES`, or the path of a config.json or of a folder that holds one.

    Raises:
        RequestError: it is neither.
        CheckpointError: the file is damaged.
    """
    if text in SHAPES:
        return text, dict(SHAPES[text])
    path = Path(text)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise RequestError(
            f"shape: found {text!r}; allowed are {', '.join(SHAPES)}, or the path of a config.json "
            "or of a folder that holds one",
            "shape",
        )
    config, _ = read_config(folder)
    if find_family(config) is None:
        raise RequestError(
            f"shape: {text} is of model_type {config.get('model_type')!r}; random checkpoints are "
            f"made of {', '.join(MODEL_TYPES)}",
            "shape",
        )
    return folder.resolve().name, config


def read_scheme(text: str) -> Scheme:
    """The scheme of a preset's name; `float` quantizes nothing.

    Raises:
        RequestError: there is no such preset.
    """
    if text == "float":
        return Scheme()
    if text not in PRESETS:
        raise RequestError(
            f"scheme: found {text!r}; allowed are float, {', '.join(PRESETS)}", "scheme"
        )
    return PRESETS[text]


def random_checkpoint(work: Path, shape: str, scheme: str, *, quantize_head: bool = False) -> Path:
    """Write a checkpoint of random weights below `work`, or find the one that is there.

    Args:
        work: Folder of such checkpoints; their names tell shape and scheme.
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        quantize_head: Quantize the head too: int8, its input per token.

    Returns:
        Its folder.

    Raises:
        RequestError: the shape or scheme is unknown, or there is no head to quantize.
        CheckpointError: the disk refuses.
    """
    name, config = read_shape(shape)
    of_all = read_scheme(scheme)
    if quantize_head and (of_all.weights is None or config.get("tie_word_embeddings", False)):
        raise RequestError(
            f"quantize_head: found scheme {scheme} and tie_word_embeddings "
            f"{config.get('tie_word_embeddings', False)}; a head is quantized where weights are, "
            "and where the embedding is not the head as well",
            "quantize_head",
        )
    key = json.dumps([config, of_all.model_dump(mode="json"), SEED], sort_keys=True)
    parts = [name, scheme, *(["head8"] if quantize_head else [])]
    out = work / "-".join([*parts, hashlib.sha256(key.encode()).hexdigest()[:8]])
    if not out.exists():
        _write(out, config, of_all, quantize_head)
    return out


def quantized_layers(
    tensors: Iterable[str], scheme: Scheme, quantize_head: bool
) -> dict[str, LayerScheme]:
    """Schemes of the linear layers that are quantized."""
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    own = scheme.of_layers
    layers = {m: own for m in modules if own.weights and is_projection(m)}
    return layers | ({HEAD: HEAD_SCHEME} if quantize_head else {})


def _write(out: Path, config: dict[str, Any], scheme: Scheme, quantize_head: bool) -> None:
    tensors = tensor_shapes(config)
    layers = quantized_layers(tensors, scheme, quantize_head)
    config = config | {"torch_dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(SEED)
    entries: list[ScaleEntry] = []
    options = {"layers": layers, "ignore": (), "shard_bytes": SHARD_BYTES}
    with CheckpointWriter(out, config=config, scheme=scheme, **options) as writer:
        for name, size in tensors.items():
            module, values = name.removesuffix(".weight"), random_values(name, size, generator)
            if module in layers:
                entries += _add_linear(writer, module, values, layers[module])
            else:
                writer.add(name, values)
        entries += _add_cache(writer, config, scheme)
        documents = _tokenizer(config["vocab_size"])
        writer.finish(ScaleTable(entries=tuple(entries)), documents)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as transformers has them."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return split_shapes(shapes, config)


def random_values(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of a model, bf16, where the generator is: Gaussian; norms are ones, biases zeros."""
    if len(size) > 1:
        values = torch.randn(size, generator=generator, device=generator.device)
        return values.mul_(DEVIATION).bfloat16()
    return torch.full(
        size, float(name.endswith(".weight")), dtype=torch.bfloat16, device=generator.device
    )


def constant_input_scale(inputs: ActivationSpec) -> Tensor:
    """The scale of a static input, fp32 [1]."""
    return choose_scale(torch.tensor([ABSMAX]), TYPES[inputs.dtype])


def _add_linear(
    writer: CheckpointWriter, module: str, values: Tensor, scheme: LayerScheme
) -> Iterator[ScaleEntry]:
    """Round a layer and add it; gives the rows of its scales."""
    weights, inputs = scheme.weights, scheme.activations
    assert weights is not None
    stored = round_to_nearest(values.float(), scheme)
    input_scale = None
    if inputs is not None and not inputs.dynamic:
        input_scale = constant_input_scale(inputs)
    writer.add_linear(module, stored, torch.bfloat16, input_scale=input_scale)
    shown = stored.scale.reshape(1) if weights.granularity == "per_tensor" else stored.scale
    absmax = values.abs().max().item()
    yield _entry(f"{module}.weight_scale", "weight", shown, weights, absmax)
    if inputs is not None and input_scale is not None:
        yield _entry(f"{module}.input_scale", "input", input_scale, inputs, ABSMAX)


def round_to_nearest(weight: Tensor, scheme: LayerScheme) -> StoredWeight:
    """Round [N, K], or several [n, N, K], to nearest.

    Scales of packed weights are bf16's, as they are stored in it.
    """
    spec = scheme.weights
    assert spec is not None
    kind, zero_point = TYPES[spec.dtype], None
    block = (1,) * (weight.dim() - 2) + spec.block
    if spec.symmetric:
        scale = choose_scale(block_absmax(weight, block), kind)
    else:
        blocks = block_view(pad_to_blocks(weight, block), block)
        inner = tuple(range(1, blocks.dim(), 2))
        scale, zero_point = choose_affine(blocks.amin(inner), blocks.amax(inner), kind)
    if storage_format(scheme) == "pack-quantized":
        scale = scale.bfloat16().float()
    if spec.two_level:
        unit = choose_unit(scale)
        scale = nearest_multiples(scale, unit) * unit
    q = quantize(weight, scale, kind, zero_point, block)
    return StoredWeight(q, scale, zero_point)


def _add_cache(
    writer: CheckpointWriter, config: dict[str, Any], scheme: Scheme
) -> Iterator[ScaleEntry]:
    """Set the cache's scales; gives their rows."""
    spec = scheme.kv_cache
    for attention, scales in kv_scales(config, scheme).items():
        assert spec is not None
        writer.set_kv_scales(attention, *scales)
        for role, scale in zip(ROLES, scales, strict=True):
            yield _entry(f"{attention}.{role[0]}_scale", role, scale, spec, ABSMAX)


def kv_scales(config: dict[str, Any], scheme: Scheme) -> dict[str, tuple[Tensor, Tensor]]:
    """Constant scales of K and V by attention module; none where the cache has no static ones."""
    spec = scheme.kv_cache
    if spec is None or spec.dynamic:
        return {}
    heads = heads_of(config)
    k, v = (spec.scale_shape(role, heads.kv, heads.size) for role in ROLES)
    kind = TYPES[spec.dtype]
    return {
        name: (choose_scale(torch.full(k, ABSMAX), kind), choose_scale(torch.full(v, ABSMAX), kind))
        for name in attention_names(config)
    }


def _entry(tensor: str, role: Role, scale: Tensor, spec: Any, absmax: float) -> ScaleEntry:
    return ScaleEntry(
        module=tensor.rpartition(".")[0],
        role=role,
        dtype=spec.dtype,
        granularity=spec.granularity,
        shape=tuple(scale.shape),
        tensor=tensor,
        scale_min=scale.min().item(),
        scale_max=scale.max().item(),
        statistic="absmax" if role == "weight" else "constant",
        absmax=absmax,
        tokens=0,
        clip_fraction=0.0,
        sqnr_db=None,
    )


def words_of(vocabulary: int) -> Tokenizer:
    """A tokenizer that has a word for every token: the engine decodes what it makes."""
    words = {f"t{i}": i for i in range(vocabulary)}
    return Tokenizer(models.WordLevel(words, unk_token="t0"))


def _tokenizer(vocabulary: int) -> dict[str, bytes]:
    """Its files."""
    settings = {"tokenizer_class": PreTrainedTokenizerFast.__name__, "unk_token": "t0"}
    return {
        "tokenizer.json": words_of(vocabulary).to_str().encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
