"""Weights of compressed-tensors by their values alone, whatever states them.

No kernel here runs integers of 3 bits, groups of 16 or in no order (actorder), or inputs in fp4.
But a weight is the same arithmetic in all of them, with the q, zero points z and scales s of
`formats.stored.weights`:

    w[n, k] = (q[n, k] - z[n, g]) s[n, g],    g the group of input k

A group is k // group_size, or `weight_g_idx` [K]; scales have one row for all outputs, for each, or
for each block of them.

Source: compressed-tensors 0.17 to 0.20, `quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from formats.checkpoint.compressed_tensors import CLASS, ArgsValues, read_values
from formats.checkpoint.native import own_layers
from formats.checkpoint.targets import is_ignored
from formats.errors import CheckpointError
from formats.foreign.folder import OF_CACHE, named
from formats.pack import unpack_elements, unpack_powers, unpack_words
from formats.stored.folder import read_config
from formats.stored.names import open_native
from formats.stored.safetensors_files import NamedTensors
from formats.stored.weights import LEAVES, check_scale_values

READ = (*LEAVES, "weight_g_idx")
LEFT = (*OF_CACHE, ".k_zero_point", ".v_zero_point")  # of a cache, which is one of floats then
QUANTIZED = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class StatedFolder(NamedTensors):
    """A folder whose quantized layers are read for their values.

    Attributes:
        config: config.json without its `quantization_config`.
        modules: Full names of its quantized layers, sorted.

    Raises:
        CheckpointError: its weights are no plain arithmetic, or no group of the settings means one.
    """

    def __init__(self, path: Path) -> None:
        found = read_config(path)
        self.path, self.config = path, found.model
        groups = read_values(found.quantization or {}).config_groups or {}
        files = own_layers(open_native(path, found.model, found.published), found.model)
        self._files = {name: file for name, file in files.items() if not name.endswith(LEFT)}
        self.modules = self.modules_stored_in(QUANTIZED)
        self._args: dict[str, ArgsValues] = {}
        for module in self.modules:
            own = [group for group in groups.values() if is_ignored(module, group.targets)]
            own += [group for group in groups.values() if CLASS in group.targets]
            if not own or own[0].weights is None:
                raise CheckpointError(
                    f"{module} has quantized weights, but no group of config_groups in config.json "
                    "says how. Copy config.json of the checkpoint again"
                )
            self._args[module] = own[0].weights

    def values(self, module: str) -> Tensor:
        """A quantized layer's weight in fp32 [N, K].

        Raises:
            CheckpointError: a tensor is missing, or of another shape than the settings say.
        """
        names = {leaf: f"{module}.{leaf}" for leaf in READ}
        tensors = {leaf: self.tensor(own) for leaf, own in names.items() if own in self}
        with named(module):
            return stated_values(self._args[module], tensors)


def stated_values(args: ArgsValues, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight that tensors stand for, fp32 [N, K]; see the top of the file.

    Args:
        tensors: By the last part of their name.

    Raises:
        CheckpointError: a scale is missing, of another shape, not finite or not positive.
    """
    q, zeros = _integers(args, tensors)
    scale = _scales(tensors).reshape(-1, 1) if args.strategy == "channel" else _scales(tensors)
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    rows, columns = q.shape
    height, width = _block(args, rows, columns)
    if scale.shape != (-(-rows // height), -(-columns // width)):
        raise CheckpointError(
            f"weight_scale has shape {list(scale.shape)} for {rows} outputs and {columns} inputs, "
            f"which is not that of strategy {args.strategy!r} with group_size {args.group_size} in "
            "config.json. Copy the checkpoint again"
        )
    row, column = torch.arange(rows) // height, _groups(tensors, columns, width, scale.shape[1])
    values = q.float()
    if zeros is not None:
        values -= zeros.float().reshape(scale.shape)[row][:, column]
    return values * scale[row][:, column]


def _block(args: ArgsValues, rows: int, columns: int) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    if args.strategy == "tensor":
        return rows, columns
    if args.strategy == "block":
        height, width = args.block_structure or (1, 1)
        return max(height, 1), max(width, 1)
    size = args.group_size or -1
    return 1, size if size > 0 else columns


def _integers(args: ArgsValues, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What is multiplied by the scales [N, K], and zero points."""
    zeros = tensors.get("weight_zero_point")
    if "weight_packed" not in tensors:
        return tensors["weight"], zeros
    packed = tensors["weight_packed"]
    if packed.dtype == torch.uint8:
        return unpack_elements(packed), None
    if "weight_shape" not in tensors:
        raise CheckpointError("weight_shape is missing; copy the checkpoint again")
    rows, columns = tensors["weight_shape"].tolist()
    bits = args.num_bits or 8
    if packed.shape != (rows, math.ceil(columns * bits / 32)):
        raise CheckpointError(
            f"weight_packed has shape {list(packed.shape)} for {rows} outputs and {columns} inputs "
            f"of {bits} bits. Copy the checkpoint again"
        )
    if zeros is not None and not zeros.is_floating_point():
        zeros = unpack_words(zeros.T.contiguous(), bits, rows).T
    return unpack_words(packed, bits, columns), zeros


def _scales(tensors: Mapping[str, Tensor]) -> Tensor:
    """Scales in fp32, in their own shape."""
    if "weight_scale" not in tensors:
        raise CheckpointError("weight_scale is missing; copy the checkpoint again")
    scale = tensors["weight_scale"]
    scale = unpack_powers(scale) if scale.dtype == torch.uint8 else scale.float()
    if "weight_global_scale" in tensors:
        scale = scale / tensors["weight_global_scale"].float()
    check_scale_values("weight_scale", scale)
    return scale


def _groups(tensors: Mapping[str, Tensor], columns: int, width: int, count: int) -> Tensor:
    """The group of each input, int64 [K]."""
    own = tensors.get("weight_g_idx")
    if own is None or bool((own < 0).any()):  # -1: in their order
        return torch.arange(columns) // width
    if own.shape != (columns,) or int(own.max()) >= count:
        raise CheckpointError(
            f"weight_g_idx is damaged: needed are {columns} groups from 0 to {count - 1}. Copy the "
            "checkpoint again"
        )
    return own.long()
