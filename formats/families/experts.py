"""Mixture-of-experts layers on disk: the names of their parts, and 3-D parameters seen as layers.

Hub checkpoints hold each expert's layers on their own, below a module M of each decoder block:

    mixtral               M = block_sparse_moe   router M.gate   M.experts.E.{w1, w3, w2}
    qwen2_moe, qwen3_moe  M = mlp                router M.gate   M.experts.E.{gate,up,down}_proj
    qwen2_moe also has    M.shared_expert.{gate,up,down}_proj and its gate M.shared_expert_gate

transformers 5 holds all experts of a block in two parameters, in every family as mlp.experts, and
can write them so. With E experts, I their inner size, H the hidden size:

    gate_up_proj  [E, 2 I, H]: gate above up          down_proj  [E, H, I]

A checkpoint of this kind is read by the first kind's names: an expert's layer is a run of rows, and
no more than these are read. Checkpoints are always written in the first kind: runtimes read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from formats.checkpoint.safetensors_files import SafetensorsFile, TensorFile
from formats.errors import CheckpointError


@dataclass(frozen=True)
class ExpertNames:
    """Names of a family: the module that holds router and experts, and an expert's layers."""

    layer: str
    gate: str
    up: str
    down: str


_QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES: Mapping[str, ExpertNames] = {  # by model_type
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
}
_PROJECTION = re.compile(r"(_proj|\.experts\.\d+\.w[123])$")
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|shared_expert_gate)$")
_STACKED = re.compile(r"^(.*)\.(mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)$")
EXPERT = re.compile(r"\.experts\.(\d+)(?=\.)")


def is_projection(module: str) -> bool:
    """Whether a full name is that of a linear layer of a decoder block that can be quantized."""
    return _PROJECTION.search(module) is not None


def is_router(module: str) -> bool:
    """Whether a full name is that of a layer that decides how much an expert counts."""
    return _ROUTER.search(module) is not None


class RowsOf:
    """Layers that are runs of rows of one parameter.

    Args:
        file: Holds the parameter.
        parameter: Its name.
        starts: First row of each layer, of the parameter seen as [rows, columns], by its tensor's
            name.
        rows: Rows of each layer.
    """

    def __init__(
        self, file: SafetensorsFile, parameter: str, starts: Mapping[str, int], rows: int
    ) -> None:
        dtype, shape = file.tensors[parameter]
        self._file, self._parameter, self._starts = file, parameter, starts
        self._width, self._nbytes = shape[-1] * dtype.itemsize, rows * shape[-1] * dtype.itemsize
        self.path = file.path
        self.tensors = dict.fromkeys(starts, (dtype, (rows, shape[-1])))

    def span(self, name: str) -> tuple[int, int]:
        """Where a layer's rows begin and end in the file, in bytes."""
        start = self._file.span(self._parameter)[0] + self._starts[name] * self._width
        return start, start + self._nbytes


def per_expert(
    files: Mapping[str, SafetensorsFile], model_type: str | None
) -> dict[str, TensorFile]:
    """The file of every tensor, 3-D parameters of experts taken apart by the family's names.

    Args:
        files: By the names on disk.
        model_type: The family; others than those of `EXPERT_NAMES` are left as they are.

    Raises:
        CheckpointError: a parameter has another shape, or lies beside layers of the same name.
    """
    names, found = EXPERT_NAMES.get(model_type or ""), dict[str, TensorFile](files)
    if names is None:
        return found
    for name, file in files.items():
        match = _STACKED.match(name)
        if match is None:
            continue
        block, layer, leaf = match.groups()
        apart: dict[str, TensorFile] = dict(_apart(file, name, f"{block}.{names.layer}", names))
        router = f"{block}.{layer}.gate.weight"
        if layer != names.layer and router in found:  # named as in memory, like the experts
            rows = files[router].tensors[router][1][0]
            renamed = f"{block}.{names.layer}.gate.weight"
            apart[renamed] = RowsOf(files[router], router, {renamed: 0}, rows)
            del found[router]
        twice = sorted(apart.keys() & found.keys())
        if twice:
            raise CheckpointError(
                f"{file.path}: holds both {name} and {twice[0]}; a checkpoint has its experts in "
                f"3-D parameters or one by one. Remove one kind, and {leaf} with it"
            )
        del found[name]
        found |= apart
    return found


def shapes_per_expert(
    shapes: Mapping[str, tuple[int, ...]], model_type: str | None
) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters as transformers has them, experts taken apart."""
    files = {name: _Shapes({name: (torch.bfloat16, shape)}) for name, shape in shapes.items()}
    found = per_expert(files, model_type)  # pyright: ignore[reportArgumentType]
    return {name: file.tensors[name][1] for name, file in found.items()}


@dataclass(frozen=True)
class _Shapes:
    """A file of no data."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    path: Path = Path()


def _apart(
    file: SafetensorsFile, name: str, moe: str, names: ExpertNames
) -> Iterator[tuple[str, RowsOf]]:
    """The layers in a 3-D parameter, by their tensors' names."""
    shape, stacked = file.tensors[name][1], name.rpartition(".")[2]
    leaves = (names.down,) if stacked == "down_proj" else (names.gate, names.up)
    if len(shape) != 3 or shape[1] % len(leaves):
        needed = "[E, H, I]" if len(leaves) == 1 else "[E, 2 I, H] with gate above up"
        raise CheckpointError(
            f"{name} has shape {list(shape)}; needed is {needed}. Save the experts one by one"
        )
    rows = shape[1] // len(leaves)
    starts = {
        f"{moe}.experts.{expert}.{leaf}.weight": expert * shape[1] + i * rows
        for expert in range(shape[0])
        for i, leaf in enumerate(leaves)
    }
    layers = RowsOf(file, name, starts, rows)
    yield from dict.fromkeys(starts, layers).items()
