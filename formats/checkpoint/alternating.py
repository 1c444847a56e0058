"""Experts in 3-D parameters whose gate and up outputs alternate, read as layers (gpt-oss).

With E experts, I their inner size, H the hidden size, below the module of a block's experts:

    gate_up_proj  [E, H, 2 I]    gate_up_proj_bias  [E, 2 I]: gate, up, gate, up ...
    down_proj     [E, I, H]      down_proj_bias     [E, H]

or, where weights are in MXFP4 (`formats.foreign.mxfp4`), with outputs as rows:

    gate_up_proj_blocks  uint8 [E, 2 I, H / 32, 16]    gate_up_proj_scales  uint8 [E, 2 I, H / 32]
    down_proj_blocks     uint8 [E, H, I / 32, 16]      down_proj_scales     uint8 [E, H, I / 32]

Blocks and scales become the tensors `weight_packed` and `weight_scale` of compressed-tensors'
mxfp4-pack-quantized, which hold the same bytes. Of a parameter no more than the expert that is
asked for is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.families.feed_forward import GatedMLP
from formats.stored.safetensors_files import StoredTensors, read_elements

LEAVES = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
SIZES = {
    "": "[E, inputs, outputs]",
    "_bias": "[E, outputs]",
    "_blocks": "[E, outputs, groups, 16]",
    "_scales": "[E, outputs, groups]",
}
_PARAMETER = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")


class OfOneExpert:
    """A tensor of one expert's layer, out of a parameter of all experts.

    Args:
        file: Holds the parameter.
        parameter: Its name.
        expert: Which.
        name: Name that the tensor gets.
        outputs: The layer's among those of the parameter.
        last: Whether outputs are the parameter's last dimension, and not the first of an expert.
    """

    def __init__(
        self,
        file: StoredTensors,
        parameter: str,
        expert: int,
        name: str,
        outputs: slice,
        last: bool,
    ) -> None:
        dtype, (_, *own) = file.tensors[parameter]
        self._file, self._parameter, self._expert = file, parameter, expert
        self._outputs, self._last = outputs, last
        rows, *inputs = reversed(own) if last else own
        rows = len(range(rows)[outputs])
        self.path: Path = file.path
        shape = (rows, math.prod(inputs)) if inputs else (rows,)
        self.tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {name: (dtype, shape)}
        self._own = {name: (dtype, tuple(own))}

    def held(self, name: str) -> Tensor:
        """The tensor, whose rows lie apart in the file."""
        expert = _Expert(self.path, self._own, self._file.span(self._parameter)[0], self._expert)
        values = read_elements({name: expert}, [name]).view(self._own[name][1])
        rows = (values.T if self._last else values)[self._outputs]
        return rows.reshape(self.tensors[name][1])


class _Expert:
    """What a parameter that begins at `start` holds of one expert."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        start: int,
        expert: int,
    ) -> None:
        self.path, self.tensors = path, tensors
        self._start, self._expert = start, expert

    def span(self, name: str) -> tuple[int, int]:
        """Where it begins and ends in the file, in bytes."""
        dtype, shape = self.tensors[name]
        nbytes = dtype.itemsize * math.prod(shape)
        start = self._start + self._expert * nbytes
        return start, start + nbytes


def alternating_experts(
    name: str, file: StoredTensors, names: GatedMLP
) -> Iterator[tuple[str, OfOneExpert]]:
    """The tensors of layers in a parameter of all experts; none of another tensor.

    Args:
        name: Of the parameter.
        file: Holds it.
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
            yield own, OfOneExpert(file, name, expert, own, part, last)
