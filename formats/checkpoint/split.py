"""Layers that lie on disk as one tensor, read as the layers that they are.

Hub checkpoints hold each expert's layers on their own, below a module M of each decoder block:

    mixtral               M = block_sparse_moe   router M.gate   M.experts.E.{w1, w3, w2}
    qwen2_moe, qwen3_moe  M = mlp                router M.gate   M.experts.E.{gate,up,down}_proj
    qwen2_moe also has    M.shared_expert.{gate,up,down}_proj and its gate M.shared_expert_gate

transformers 5 holds all experts of a block in two parameters, in every family as mlp.experts, and
can write them so. With E experts, I their inner size, H the hidden size:

    gate_up_proj  [E, 2 I, H]: gate above up          down_proj  [E, H, I]

Where a family has gate and up alternate there instead, `formats.checkpoint.alternating` reads them.

Some families (Phi-3) hold q, k and v, or gate and up, as one layer, one below the other. Whatever
belongs to the rows of its weight (scales, zero points, a bias) is cut like them; one scale for all
rows, of the weight or of the input, is every part's.

All of these are read by the names of the layers themselves: each is a run of rows, and no more than
these are read. `formats.checkpoint.join` is the way back for layers that a family stores merged;
experts are always written one by one, which is what runtimes read.

The way back from `formats.checkpoint.alternating`: experts' layers put into parameters of all.

Floats, MXFP4 and biases go back into the parameters that they came from, bit for bit; a layer that
is quantized otherwise is written on its own, which is what runtimes read, as its parameter has no
form for it.
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

from formats.checkpoint.alternating import LEAVES, alternating_experts
from formats.errors import CheckpointError
from formats.families.feed_forward import Mixture
from formats.families.names import block_of
from formats.families.registry import find_family
from formats.families.sizes import merged_rows, size_in
from formats.stored.safetensors_files import StoredTensors, TensorFile, read_elements

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {leaf: kind for kind, leaf in LEAVES.items()}
_LAYER = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.([^.]+)")


class ExpertStacks:
    """Layers of experts that wait until all of a parameter are there.

    Args:
        names: The family's mixture, whose experts alternate.
        config: config.json.
    """

    def __init__(self, names: Mixture, config: Mapping[str, Any]) -> None:
        self._names, self._config = names, config
        self._waiting: dict[str, dict[tuple[int, str], tuple[str, Tensor]]] = {}

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor belongs in a parameter of all experts."""
        match = _LAYER.fullmatch(name)
        if match is None or match[4] not in KINDS:
            return False
        return tensor.dtype in FLOATS if match[4] in ("weight", "bias") else _is_mxfp4(tensor)

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter, if this was the last of its layers."""
        match = _LAYER.fullmatch(name)
        assert match is not None
        experts, number, leaf, kind = match[1], int(match[2]), match[3], KINDS[match[4]]
        layer = self._names.expert
        stacked, leaves = ("down_proj", (layer.down,))
        if leaf != layer.down:
            stacked, leaves = "gate_up_proj", layer.gate_up
        stored = f"{experts}.{stacked}{kind}"
        waiting = self._waiting.setdefault(stored, {})
        waiting[number, leaf] = name, tensor
        count = size_in(self._config, self._names.count)
        if len(waiting) == count * len(leaves):
            del self._waiting[stored]
            parts = [[waiting[i, leaf][1] for leaf in leaves] for i in range(count)]
            yield stored, _stacked(parts, kind)

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What waits in vain, by the names that it was added by: other layers have other forms."""
        for waiting in self._waiting.values():
            yield from waiting.values()
        self._waiting = {}


def _is_mxfp4(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8


def _stacked(experts: list[list[Tensor]], kind: str) -> Tensor:
    """Layers' tensors [outputs, ...] as the parameter of all, outputs of each expert in turn."""
    own = torch.stack([torch.stack(layers, dim=1).flatten(0, 1) for layers in experts])
    if kind == "":
        return own.mT.contiguous()
    return own.unflatten(-1, (-1, 16)) if kind == "_blocks" else own


SHAPE = "weight_shape"
ONE_FOR_ALL = "input_scale"
_STACKED = re.compile(r"^(.*)\.(\w+)\.experts\.(gate_up_proj|down_proj)$")


class RowsOf:
    """Layers that are runs of rows of one tensor.

    Args:
        file: Holds the tensor.
        tensor: Its name.
        starts: First row of each layer, of the tensor seen as [rows, columns], by the name that
            its own tensor gets.
        shape: Of each layer's own tensor.
    """

    def __init__(
        self,
        file: StoredTensors,
        tensor: str,
        starts: Mapping[str, int],
        shape: tuple[int, ...],
    ) -> None:
        dtype = file.tensors[tensor][0]
        width = dtype.itemsize * (shape[-1] if len(shape) > 1 else 1)
        self._file, self._tensor, self._starts = file, tensor, starts
        self._width, self._nbytes = width, dtype.itemsize * math.prod(shape)
        self.path = file.path
        self.tensors = dict.fromkeys(starts, (dtype, shape))

    def span(self, name: str) -> tuple[int, int]:
        """Where a layer's rows begin and end in the file, in bytes."""
        start = self._file.span(self._tensor)[0] + self._starts[name] * self._width
        return start, start + self._nbytes


class ShapeOf:
    """The stored shape, int64 [2], of a layer whose packed weight is a run of rows.

    Args:
        file: Holds the shape of the whole.
        tensor: Its name.
        name: Name that the layer's own shape gets.
        rows: Of the layer.
    """

    def __init__(self, file: StoredTensors, tensor: str, name: str, rows: int) -> None:
        self._file, self._tensor, self._rows = file, tensor, rows
        self.path = file.path
        self.tensors = {name: (torch.int64, (2,))}

    def held(self, name: str) -> Tensor:
        """The layer's own shape, which no file has."""
        whole = read_elements({self._tensor: self._file}, [self._tensor])
        return torch.stack((torch.tensor(self._rows), whole[1]))


def split_stored(
    files: Mapping[str, StoredTensors], config: Mapping[str, Any], *, predicting: bool = False
) -> dict[str, TensorFile]:
    """The file of every tensor, layers that are stored as one taken apart by the family's names.

    Args:
        files: By the names on disk.
        config: config.json; without a declaration of its family, files are left as they are.
        predicting: Keep the layers after the last block, which predict further tokens.

    Raises:
        CheckpointError: a tensor has another shape, or is beside layers of the same name.
    """
    family, found = find_family(config), dict[str, TensorFile](files)
    if family is None:
        return found
    if not predicting and family.predicting is not None and config.get(family.predicting):
        count = size_in(config, "num_hidden_layers")
        files = {name: file for name, file in files.items() if not _lies_behind(name, count)}
        found = dict[str, TensorFile](files)
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


def _lies_behind(name: str, count: int) -> bool:
    """Whether a tensor is one of a layer after so many blocks."""
    block = block_of(name)
    return block is not None and int(block.rpartition(".")[2]) >= count


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
            found[own] = ShapeOf(file, name, own, rows)
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
    found: dict[str, TensorFile],
    files: Mapping[str, StoredTensors],
    name: str,
    names: Mixture,
) -> None:
    """Put experts' layers in the place of a 3-D parameter of all; others are left alone."""
    match = _STACKED.match(name)
    if match is None or match[2] not in ("mlp", names.module):
        return
    file, (block, layer, _) = files[name], match.groups()
    apart: dict[str, TensorFile] = dict(_apart(file, name, f"{block}.{names.module}", names))
    router = f"{block}.{layer}.{names.router}.weight"
    if layer != names.module and router in found:  # named as in memory, like the experts
        renamed, stored = f"{block}.{names.module}.{names.router}.weight", files[router]
        apart[renamed] = RowsOf(stored, router, {renamed: 0}, stored.tensors[router][1])
        del found[router]
    _put_apart(found, name, file, apart)


def _put_apart(
    found: dict[str, TensorFile],
    name: str,
    file: StoredTensors,
    apart: Mapping[str, TensorFile],
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
