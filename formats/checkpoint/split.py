"""Layers that are one tensor on disk, read as the layers that they are.

Hub checkpoints hold each expert's layers on their own, below a module M of each decoder block:

    mixtral               M = block_sparse_moe   router M.gate   M.experts.E.{w1, w3, w2}
    qwen2_moe, qwen3_moe  M = mlp                router M.gate   M.experts.E.{gate,up,down}_proj
    qwen2_moe also has    M.shared_expert.{gate,up,down}_proj and its gate M.shared_expert_gate

transformers 5 holds all experts of a block in two parameters, in every family as mlp.experts, and
can write them so. With E experts, I their inner size, H the hidden size:

    gate_up_proj  [E, 2 I, H]: gate above up          down_proj  [E, H, I]

gpt-oss has gate and up alternate there instead, with outputs last:

    gate_up_proj  [E, H, 2 I]    gate_up_proj_bias  [E, 2 I]: gate, up, gate, up ...
    down_proj     [E, I, H]      down_proj_bias     [E, H]

or, where weights are in MXFP4 (`formats.foreign.mxfp4`), with outputs as rows:

    gate_up_proj_blocks  uint8 [E, 2 I, H / 32, 16]    gate_up_proj_scales  uint8 [E, 2 I, H / 32]
    down_proj_blocks     uint8 [E, H, I / 32, 16]      down_proj_scales     uint8 [E, H, I / 32]

Blocks and scales become the tensors `weight_packed` and `weight_scale` of compressed-tensors'
mxfp4-pack-quantized, which hold the same bytes. Of a parameter no more than the expert that is
asked for is read.

Some families (Phi-3) hold q, k and v, or gate and up, as one layer, one below the other. Whatever
belongs to the rows of its weight (scales, zero points, a bias) is cut like them; one scale for all
rows, of the weight or of the input, is every part's.

All of these are read by the names of the layers themselves: each is a run of rows, and no more than
these are read. `formats.checkpoint.join` is the way back for layers that a family stores merged;
experts are always written one by one, which is what runtimes read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.families.family import GatedMLP, Mixture
from formats.families.predicting import UNDECLARED
from formats.families.registry import find_family
from formats.families.sizes import merged_rows
from formats.modeling.layers import renamed_of, stacks_of
from formats.stored.names import copy_shared, renamed
from formats.stored.safetensors_files import (
    Computed,
    RowsOf,
    StoredTensors,
    TensorFile,
    read_tensor,
)

SHAPE = "weight_shape"
ONE_FOR_ALL = "input_scale"
_STACKED = re.compile(r"^(.*)\.(\w+)\.experts\.(gate_up_proj|down_proj)$")
LEAVES = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
SIZES = {
    "": "[E, inputs, outputs]",
    "_bias": "[E, outputs]",
    "_blocks": "[E, outputs, groups, 16]",
    "_scales": "[E, outputs, groups]",
}
_PREDICTING = re.compile(rf"({UNDECLARED.module}\.layers\.\d+)(\..+)")
_PARAMETER = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")


def _of_one_expert(
    file: StoredTensors, parameter: str, expert: int, name: str, outputs: slice, last: bool
) -> Computed:
    """A tensor of one expert's layer, out of a parameter of all experts.

    Args:
        outputs: The layer's among those of the parameter.
        last: Whether outputs are the parameter's last dimension, and not the first of an expert.
    """
    dtype, (_, *own) = file.tensors[parameter]
    rows, *inputs = reversed(own) if last else own
    rows = len(range(rows)[outputs])
    shape = (rows, math.prod(inputs)) if inputs else (rows,)
    first = expert * math.prod(own[:-1] if inputs else own)
    stored = RowsOf(file, parameter, {name: first}, tuple(own))

    def taken() -> Tensor:
        """The layer's rows, which are apart in the file."""
        values = read_tensor(stored, name)
        return (values.T if last else values)[outputs].reshape(shape)

    return Computed(file.path, name, (dtype, shape), taken)


def alternating_experts(
    name: str, file: StoredTensors, names: GatedMLP
) -> Iterator[tuple[str, Computed]]:
    """The tensors of layers in a parameter of all experts; none of another tensor.

    Args:
        names: Of an expert's layers.

    Raises:
        CheckpointError: it has another number of dimensions, or an odd number of gate and up.
    """
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return
    experts, stacked, kind = match.groups()
    leaves = (names.down,) if stacked == "down_proj" else names.gate_up
    shape, last, size = file.tensors[name][1], kind == "", SIZES[kind]
    outputs = shape[-1 if last else 1] if len(shape) == size.count(",") + 1 else 1
    if len(shape) != size.count(",") + 1 or outputs % len(leaves):
        raise CheckpointError(
            f"{name} has shape {list(shape)}; needed is {size}, outputs of gate and up in turn. "
            "Get the checkpoint again"
        )
    for expert in range(shape[0]):
        for i, leaf in enumerate(leaves):
            own = f"{experts}.{expert}.{leaf}.{LEAVES[kind]}"
            part = slice(i, None, len(leaves))
            yield own, _of_one_expert(file, name, expert, own, part, last)


def _shape_of(file: StoredTensors, tensor: str, name: str, rows: int) -> Computed:
    """The shape, int64 [2], of a layer of so many rows whose packed weight is a part of another's.

    No file has it; `tensor` is the shape of the whole.
    """

    def made() -> Tensor:
        whole = read_tensor(file, tensor)
        return torch.stack((torch.tensor(rows), whole[1]))

    return Computed(file.path, name, (torch.int64, (2,)), made)


def split_stored(
    files: Mapping[str, StoredTensors], config: Mapping[str, Any]
) -> dict[str, TensorFile]:
    """The file of every tensor, layers that are stored as one taken apart by the family's names.

    Args:
        files: By the names on disk.
        config: config.json; without a declaration of its family, only experts are taken apart.

    Raises:
        CheckpointError: a tensor has another shape, or is beside layers of the same name.
    """
    family, found = find_family(config), dict[str, TensorFile](files)
    if family is None:
        _split_stacks(found, files, config)
        copy_shared(found, files, config)
        return found
    if family.mixture is not None:
        for name, file in files.items():
            if family.mixture.alternating:
                _put_apart(
                    found, name, file, dict(alternating_experts(name, file, family.mixture.expert))
                )
            else:
                _split_experts(found, files, name, family.mixture)
    if family.stored_merged:
        for name, file in files.items():
            _split_merged(found, name, file, merged_rows(family, config))
    return found


def _split_stacks(
    found: dict[str, TensorFile], files: Mapping[str, StoredTensors], config: Mapping[str, Any]
) -> None:
    """Put experts' layers in the place of parameters of all, as the model's own code has them.

    What files have by a name of the code gets the one that transformers saves it by: it saves some
    under others than they were published (the dense block of Kimi Linear, norms of OLMo Hybrid).
    """
    if not any(len(file.tensors[name][1]) == 3 for name, file in files.items()):
        return  # and its code is not looked at
    for code, own in renamed_of(config).items():
        if code in files and own not in files:
            del found[code]
            found[own] = renamed(files[code], code, own)
    stacks = stacks_of(config, listed=True)
    for parameter, file in files.items():
        names = stacks.get(parameter) or _predicting_stack(parameter, stacks)
        if not names:
            continue
        count, rows, *columns = file.tensors[parameter][1]
        if count * rows % len(names):
            raise CheckpointError(
                f"{parameter} has shape {[count, rows, *columns]}, which are not the rows of "
                f"{len(names)} layers. The checkpoint and its config.json do not belong together"
            )
        rows = count * rows // len(names)
        starts = {name: i * rows for i, name in enumerate(names)}
        apart = RowsOf(file, parameter, starts, (rows, *columns))
        _put_apart(found, parameter, file, dict.fromkeys(names, apart))


def _predicting_stack(parameter: str, stacks: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What `Structure.stacks` has not: a parameter of a layer that predicts further tokens, cut as
    that of a block of the model; empty for any other parameter."""
    match = _PREDICTING.fullmatch(parameter)
    if match is None:
        return ()
    layer, leaf = match.groups()
    other = next((name for name in stacks if name.endswith(leaf)), None)
    block = "" if other is None else other.removesuffix(leaf)
    names = () if other is None else stacks[other]
    return tuple(layer + name.removeprefix(block) for name in names)


def split_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters as transformers has them, layers taken apart."""
    files = {name: _Shapes({name: (torch.bfloat16, shape)}) for name, shape in shapes.items()}
    found = split_stored(files, config)  # pyright: ignore[reportArgumentType]
    return {name: file.tensors[name][1] for name, file in found.items()}


@dataclass(frozen=True)
class _Shapes:
    """A file of no data."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    path: Path = Path()


def _split_merged(
    found: dict[str, TensorFile],
    name: str,
    file: StoredTensors,
    merged: Mapping[str, Mapping[str, int]],
) -> None:
    """Put the parts of a merged layer's tensor in its place; other tensors are left alone."""
    module, _, leaf = name.rpartition(".")
    parent, _, whole = module.rpartition(".")
    if whole not in merged:
        return
    parts, shape = merged[whole], file.tensors[name][1]
    total, first = sum(parts.values()), 0
    del found[name]
    for part, rows in parts.items():
        own = f"{parent}.{part}.{leaf}"
        if leaf == SHAPE:
            found[own] = _shape_of(file, name, own, rows)
        elif leaf == ONE_FOR_ALL or shape in ((), (1,)):
            found[own] = RowsOf(file, name, {own: 0}, shape or (1,))
        elif rows * shape[0] % total:
            raise CheckpointError(
                f"{file.path}: {name} has {shape[0]} rows for {total} outputs, which cannot be cut "
                f"into the {rows} of {part}. Write the checkpoint with a scheme per channel"
            )
        else:
            count = rows * shape[0] // total
            found[own] = RowsOf(file, name, {own: first}, (count, *shape[1:]))
            first += count


def _split_experts(
    found: dict[str, TensorFile], files: Mapping[str, StoredTensors], name: str, names: Mixture
) -> None:
    """Put experts' layers in the place of a 3-D parameter of all; others are left alone."""
    match = _STACKED.match(name)
    if match is None or match[2] not in ("mlp", names.module):
        return
    file, (block, layer, _) = files[name], match.groups()
    apart: dict[str, TensorFile] = dict(_apart(file, name, f"{block}.{names.module}", names))
    router = f"{block}.{layer}.{names.router}.weight"
    if layer != names.module and router in found:  # named as in memory, like the experts
        own = f"{block}.{names.module}.{names.router}.weight"
        apart[own] = renamed(files[router], router, own)
        del found[router]
    _put_apart(found, name, file, apart)


def _put_apart(
    found: dict[str, TensorFile], name: str, file: StoredTensors, apart: Mapping[str, TensorFile]
) -> None:
    """Put layers in the place of the parameter of all experts that holds them, if any."""
    twice = sorted(apart.keys() & found.keys())
    if twice:
        raise CheckpointError(
            f"{file.path}: holds both {name} and {twice[0]}; a checkpoint has its experts in "
            f"3-D parameters or one by one. Remove one kind, and {name.rpartition('.')[2]} with it"
        )
    if apart:
        del found[name]
        found |= apart


def _apart(
    file: StoredTensors, name: str, module: str, names: Mixture
) -> Iterator[tuple[str, RowsOf]]:
    """The layers in a 3-D parameter, by their tensors' names."""
    shape, stacked = file.tensors[name][1], name.rpartition(".")[2]
    leaves = (names.expert.down,) if stacked == "down_proj" else names.expert.gate_up
    if len(shape) != 3 or shape[1] % len(leaves):
        needed = "[E, H, I]" if len(leaves) == 1 else "[E, 2 I, H] with gate above up"
        raise CheckpointError(
            f"{name} has shape {list(shape)}; needed is {needed}. Save the experts one by one"
        )
    rows = shape[1] // len(leaves)
    starts = {
        f"{module}.experts.{expert}.{leaf}.weight": expert * shape[1] + i * rows
        for expert in range(shape[0])
        for i, leaf in enumerate(leaves)
    }
    layers = RowsOf(file, name, starts, (rows, shape[-1]))
    yield from dict.fromkeys(starts, layers).items()
