"""A quantized checkpoint of any layout as the float model that it stands for.

Weights become (q - zero_point) * scale, or what a layout without an integer grid says, in fp32 and
rounded once to the type asked for. Layers that are not quantized are copied bit for bit.

Of compressed-tensors any weight is read that values alone describe. No kernel here runs integers of
3 bits, groups of 16 or in no order (actorder), or inputs in fp4. But a weight is the same
arithmetic in all of them, with the q, zero points z and scales s of `formats.stored.weights`:

    w[n, k] = (q[n, k] - z[n, g]) s[n, g],    g the group of input k

A group is k // group_size, or `weight_g_idx` [K]; scales have one row for all outputs, for each, or
for each block of them.

Source: compressed-tensors 0.17 to 0.20, `quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.adapters import Lora, read_lora
from formats.adapters.factors import factors_document
from formats.adapters.merge import write_merged
from formats.adapters.settings import adapter_folder
from formats.checkpoint.compressed_tensors import (
    CLASS,
    ArgsValues,
    UnsupportedSchemeError,
    read_values,
)
from formats.checkpoint.contents import is_foreign
from formats.checkpoint.native import own_layers
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.targets import is_ignored
from formats.errors import CheckpointError, RequestError
from formats.foreign.folder import OF_CACHE, ForeignFolder, named
from formats.modeling.layers import embedding_name, head_name
from formats.pack import unpack_elements, unpack_powers, unpack_words
from formats.scale_table import ScaleTable
from formats.scheme import Scheme
from formats.stored.folder import auxiliary_files, read_config
from formats.stored.names import open_native
from formats.stored.safetensors_files import NamedTensors
from formats.stored.weights import LEAVES, check_scale_values
from ptq.convert import FLOAT_TYPES
from ptq.convert.conversion import Conversion, Destination, Source, surplus_tensors
from ptq.methods.common.float_model import values_of

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


FLOATS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOAT_TYPES}
TYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, as transformers 5 and 4 write it


def to_float(
    path: Path, to: Destination, dtype: str | None, adapter: Path | None = None
) -> Conversion:
    """Write a folder's weights in floating point; arguments as in `ptq.convert.convert.convert`.

    Raises:
        CheckpointError: nothing is quantized, the type is not known, a weight does not fit it, a
            file is damaged, or the adapter is not one of this model.
    """
    source, scheme, modules, read = _open(path)
    lora = None if adapter is None else _adapter(adapter, source, path)
    key, dtype = _type(source.config, dtype)
    surplus, rounding = surplus_tensors(source, modules), 0.0
    with to.writer(source.config | {key: dtype}, Scheme(), auxiliary_files(path)) as writer:

        def add(name: str, tensor: Tensor) -> None:
            writer.add(name, tensor if lora is None else lora.merged_tensor(name, tensor))

        for module in to.layers(source, modules, add, surplus):
            exact = read(module) if lora is None else lora.merged(module, read(module))
            weight = exact.to(FLOATS[dtype])
            rounding = max(rounding, _rounding(exact, weight))
            writer.add(f"{_stored_as(source, module)}.weight", weight)
        writer.finish(ScaleTable(entries=()), factors_document(path))
    notes = tuple(_notes(scheme, dtype, rounding))
    return Conversion(modules=len(modules), scale_rounding=rounding, notes=notes)


def merge_adapter(
    source: Path, adapter: str | Path, to: Destination, dtype: str | None
) -> Conversion:
    """A float model with an adapter merged in; weights that are floats keep their types.

    Raises:
        RequestError: a type is given, and the weights are floats already.
        CheckpointError: as of `to_float`.
    """
    adapter, (_, quantization, own, *_) = adapter_folder(adapter), read_config(source)
    note = f"The adapter {adapter} is part of its weights."
    if quantization is not None or (own is not None and own.any):
        done = to_float(source, to, dtype, adapter)
        return done.model_copy(update={"notes": (*done.notes, note)})
    if dtype is not None:
        raise RequestError(
            f"--dtype {dtype}: {source} is a float model, whose weights keep their types when an "
            "adapter is merged in; leave --dtype out",
            "dtype",
        )
    shards, shown = to.shard_bytes, to.progress
    write_merged(source, adapter, to.out, force=to.force, shard_bytes=shards, progress=shown)
    return Conversion(modules=0, scale_rounding=0.0, notes=(note,))


def _adapter(adapter: Path, source: Source, path: Path) -> Lora:
    if isinstance(source, Checkpoint):
        return read_lora(adapter, source)
    raise CheckpointError(
        f"{path}: an adapter is not merged into weights of this layout. Make floats of them first, "
        "without --adapter, and merge it into these"
    )


def _stored_as(source: Source, module: str) -> str:
    """The module whose weight a float model stores of a layer: the embedding, of a tied head."""
    shares = isinstance(source, Checkpoint) and source.shares_head
    if not shares or module != head_name(source.config):
        return module
    return embedding_name(source.config)


def _open(path: Path) -> tuple[Source, Scheme, Sequence[str], Callable[[str], Tensor]]:
    """A folder, its scheme, its quantized layers, and what reads a layer's weight in fp32."""
    if is_foreign(read_config(path).quantization):
        folder = ForeignFolder(path)
        if folder.has_values:  # of more than the schemes here express
            return folder, Scheme(), folder.modules, folder.values
    try:
        checkpoint = Checkpoint.open(path, to_run=False)
    except UnsupportedSchemeError:
        stated = StatedFolder(path)
        return stated, Scheme(), stated.modules, stated.values
    if not checkpoint.scheme.quantizes_anything:
        raise CheckpointError(f"{path} is a float model already; copy it as it is")
    modules, read = checkpoint.quantized_modules, partial(values_of, checkpoint)
    return checkpoint, checkpoint.scheme, modules, read


def _type(config: dict[str, Any], dtype: str | None) -> tuple[str, str]:
    """Key and value of config.json that say the type; the one asked for, or else the model's."""
    key = next((key for key in TYPE_KEYS if key in config), TYPE_KEYS[0])
    found = dtype or config.get(key)
    if found not in FLOATS:
        raise CheckpointError(
            f"config.json: found dtype {found!r}; allowed: {', '.join(FLOATS)}. Say which type the "
            "weights shall have with --dtype"
        )
    return key, found


def _rounding(exact: Tensor, weight: Tensor) -> float:
    """Largest relative difference of the values that are not zero."""
    ratio = ((weight.float() - exact).abs() / exact.abs())[exact != 0]
    return ratio.max().item() if ratio.numel() else 0.0


def _notes(scheme: Scheme, dtype: str, rounding: float) -> Iterable[str]:
    if rounding and dtype != "float32":
        yield f"Weights are rounded to {dtype}; --dtype float32 keeps them exact."
    if scheme.activations is not None:
        yield f"The source's {scheme.activations.text} run in float now."
    if scheme.kv_cache is not None:
        yield f"The source's cache, {scheme.kv_cache.text}, and its scales are left out."
    if scheme.states is not None:
        yield "Recurrent states are kept in float now."
