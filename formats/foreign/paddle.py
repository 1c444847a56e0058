"""PaddleNLP's three tables of scales, as JSON: activations, weights and cache KV.

    act_scales.json       F.layers.I.self_attn.q_proj.activation_quanter     number
    weight_scales.json    F.layers.I.self_attn.q_proj.weight_quanter         [outputs], fp8: number
    cachekv_scales.json   F.layers.I.self_attn.cachek_matmul.activation_quanter, cachev_matmul...
                                                                             [query heads]

F is the family, such as `llama`. Values are the largest magnitude that is rendered, not the step:
scale * 127, for fp8 scale * 448. They are written in fp64, where this product is exact, so that
dividing gives the same fp32 scale back; Paddle rounds them to fp32. Cache tables have an entry for
each query head, of which readers take every (query heads / KV heads)-th. All three files are
written, empty where nothing is there; int8 tables are read.

Source: PaddleNLP `paddlenlp/experimental/model_utils.py` (ActScalesLoader, WeightScalesLoader,
CacheScaleLoader) and the scale maps of `experimental/transformers`.

To be read for a model, a table of nothing leaves its part of the scheme unquantized. What is there
must name every layer, once and with the right number of entries: Paddle leaves out a layer that a
table does not name, and takes the first of the entries of a KV head, both in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.families.block_layers import MERGED
from formats.families.registry import FAMILIES, attention_names, find_family
from formats.families.sizes import heads_of
from formats.scheme import Scheme
from formats.stored.weights import check_scale

if TYPE_CHECKING:
    from formats.checkpoint.read import Checkpoint

Table = dict[str, float | list[float]]
FILES = ("act_scales.json", "weight_scales.json", "cachekv_scales.json")
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}


def paddle_tables(checkpoint: Checkpoint) -> dict[str, Table]:
    """The tables of a checkpoint by their file's name.

    Raises:
        CheckpointError: another model family, a scheme that the tables do not express, or input
            scales that differ within a merged product.
    """
    refuse_paddle(checkpoint.scheme)
    checkpoint.require_one_scheme("a set of Paddle's tables")
    require_family(checkpoint.config)
    return dict(
        zip(FILES, (_inputs(checkpoint), _weights(checkpoint), _cache(checkpoint)), strict=True)
    )


def require_family(config: Mapping[str, Any]) -> str:
    """The family of a model, as Paddle's tables name it.

    Raises:
        CheckpointError: names in the tables are not known of it.
    """
    family = find_family(config)
    if family is None or family.paddle is None:
        known = ", ".join(family.paddle for family in FAMILIES if family.paddle)
        raise CheckpointError(
            f"config.json: found model_type {config.get('model_type')!r}; names in Paddle's tables "
            f"are known of {known} only"
        )
    return family.paddle


def refuse_paddle(scheme: Scheme) -> None:
    """Refuse a scheme that the tables do not express.

    Raises:
        CheckpointError: see the message.
    """
    weights, inputs, cache = scheme.weights, scheme.activations, scheme.kv_cache
    kinds = {("int8", "per_channel"), ("fp8_e4m3", "per_tensor")}
    found = None
    if weights is None and cache is None:
        found = "a float checkpoint"
    elif weights and (not weights.symmetric or (weights.dtype, weights.granularity) not in kinds):
        found = weights.text
    elif inputs and inputs.dynamic:
        found = inputs.text
    elif cache and (cache.dtype != "int8" or cache.granularity not in ("per_head", "per_tensor")):
        found = f"cache {cache.dtype} {cache.granularity}"
    if found:
        raise CheckpointError(
            f"found {found}; Paddle's tables hold int8 weights per channel or fp8 weights per "
            "tensor, static inputs per tensor, and a static int8 cache per head or per tensor. "
            "Quantize with a recipe such as a8w8c8"
        )


def _inputs(checkpoint: Checkpoint) -> Table:
    spec = checkpoint.scheme.activations
    if spec is None:
        return {}
    modules = checkpoint.quantized_modules
    scales = {module: checkpoint.scale(f"{module}.input_scale") for module in modules}
    check_merged({module: scale.item() for module, scale in scales.items()})
    return {
        f"{_name(checkpoint, module)}.activation_quanter": _numbers(scale, LARGEST[spec.dtype])[0]
        for module, scale in scales.items()
    }


def check_merged(scales: Mapping[str, float]) -> None:
    """Refuse input scales by layer that differ within a product that Paddle merges.

    Raises:
        CheckpointError: they do.
    """
    for first, scale in scales.items():
        module, _, leaf = first.rpartition(".")
        for parts in MERGED.values():  # Paddle takes the input scale of the first for all
            for other in (f"{module}.{name}" for name in parts[1:] if leaf == parts[0]):
                if scales.get(other, scale) != scale:
                    raise CheckpointError(
                        f"input scales of {first} and {other} differ ({scale:.6g} and "
                        f"{scales[other]:.6g}); Paddle would use the first for both. Write the "
                        "checkpoint again with one scale"
                    )


def _weights(checkpoint: Checkpoint) -> Table:
    spec, table = checkpoint.scheme.weights, Table()
    if spec is None:
        return table
    for module in checkpoint.quantized_modules:
        numbers = _numbers(checkpoint.scale(f"{module}.weight_scale"), LARGEST[spec.dtype])
        one = spec.granularity == "per_tensor"
        table[f"{_name(checkpoint, module)}.weight_quanter"] = numbers[0] if one else numbers
    return table


def _cache(checkpoint: Checkpoint) -> Table:
    table, queries = Table(), heads_of(checkpoint.config).query
    for attention, pair in checkpoint.kv_scales.items():
        for letter, scale in zip("kv", pair, strict=True):
            of_queries = scale.repeat_interleave(queries // len(scale))
            name = f"{_name(checkpoint, attention)}.cache{letter}_matmul.activation_quanter"
            table[name] = _numbers(of_queries, LARGEST["int8"])
    return table


def _numbers(scale: Tensor, largest: float) -> list[float]:
    """Largest magnitudes of fp32 scales, exact in fp64: 24 + 9 bits."""
    return (scale.flatten().double() * largest).tolist()


def _name(checkpoint: Checkpoint, module: str) -> str:
    return table_name(require_family(checkpoint.config), module)


def table_name(family: str, module: str) -> str:
    """A module's name in the tables, without `_quanter`."""
    return f"{family}.{module.removeprefix('model.')}"


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PaddleScales:
    """Scales in fp32; a part that is not quantized is empty.

    Attributes:
        inputs: [1] by layer.
        weights: [N, 1] by layer.
        cache: (K, V), each [KV heads], by attention.
    """

    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    cache: dict[str, tuple[Tensor, Tensor]]


def read_paddle(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> PaddleScales:
    """The scales in a folder of tables.

    Args:
        folder: Has `act_scales.json`, `weight_scales.json` and `cachekv_scales.json`.
        shapes: [N, K] of each linear layer by its full name.

    Raises:
        CheckpointError: a table is missing or damaged, names other layers than the model has, or
            has entries of another number, kind or sign.
    """
    family = require_family(config)
    inputs, weights, cache = (_read_table(folder, name) for name in FILES)
    layers = {table_name(family, module): module for module in shapes}
    scales = PaddleScales(
        inputs={
            module: _scale(FILES[0], f"{name}.activation_quanter", inputs, 1)
            for name, module in (layers if inputs else {}).items()
        },
        weights={
            module: _scale(FILES[1], f"{name}.weight_quanter", weights, shapes[module][0])[:, None]
            for name, module in (layers if weights else {}).items()
        },
        cache=_read_cache(family, config, cache) if cache else {},
    )
    _refuse_others(FILES[0], inputs, {f"{name}.activation_quanter" for name in layers})
    _refuse_others(FILES[1], weights, {f"{name}.weight_quanter" for name in layers})
    check_merged({module: scale.item() for module, scale in scales.inputs.items()})
    return scales


def _read_table(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; needed are {', '.join(FILES)}, of the whole model and not of a "
            "rank ({} where a part is not quantized)"
        )
    try:
        table = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); get it again") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: not an object of names and numbers; get it again")
    return table


def _scale(file: str, name: str, table: Mapping[str, Any], count: int) -> Tensor:
    """absmax / 127 of an entry, fp32 [count]; divided in fp64, as tables are written."""
    if name not in table:
        raise CheckpointError(
            f"{file}: {name} is missing. A table names every layer, or is empty; get it again"
        )
    found = table[name] if isinstance(table[name], list) else [table[name]]
    if not all(type(value) in (int, float) for value in found) or len(found) != count:
        raise CheckpointError(
            f"{file}: {name} has {len(found)} entries ({str(found)[:40]}); needed are {count} "
            "numbers. The table belongs to another model, or to fp8, which is not read"
        )
    scale = torch.tensor(found, dtype=torch.float64) / LARGEST["int8"]
    check_scale(f"{file}: {name}", scale.float(), ((count,),))
    return scale.float()


def _read_cache(
    family: str, config: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    heads, scales = heads_of(config), {}
    names: set[str] = set()
    for attention in attention_names(config):
        pair = []
        for letter in "kv":
            name = f"{table_name(family, attention)}.cache{letter}_matmul.activation_quanter"
            of_queries = _scale(FILES[2], name, table, heads.query).reshape(heads.kv, -1)
            if bool((of_queries != of_queries[:, :1]).any()):
                raise CheckpointError(
                    f"{FILES[2]}: {name} differs between query heads of one KV head, whose cache "
                    "has one scale. The table belongs to another model; get it again"
                )
            pair.append(of_queries[:, 0].contiguous())
            names.add(name)
        scales[attention] = (pair[0], pair[1])
    _refuse_others(FILES[2], table, names)
    return scales


def _refuse_others(file: str, table: Mapping[str, Any], names: set[str]) -> None:
    others = sorted(table.keys() - names)
    if others:
        raise CheckpointError(
            f"{file}: {others[0]} is not expected; allowed are names such as {min(names)}. Zero "
            "points and layers that the model does not have are not read"
        )
