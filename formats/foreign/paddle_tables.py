"""PaddleNLP's three tables of int8 scales, read for a model; `formats.foreign.paddle` writes them.

A table of nothing leaves its part of the scheme unquantized. What is there must name every layer,
once and with the right number of entries: Paddle leaves out a layer that a table does not name, and
takes the first of the entries of a KV head, both in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.families.registry import attention_names
from formats.families.sizes import heads_of
from formats.foreign.paddle import FILES, LARGEST, check_merged, require_family, table_name
from formats.stored.weights import check_scale

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
        config: config.json of the model.
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
        cache=_cache(family, config, cache) if cache else {},
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
    """absmax / 127 of an entry, fp32 [count]; divided in fp64, as `formats.foreign.paddle` says."""
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


def _cache(
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
