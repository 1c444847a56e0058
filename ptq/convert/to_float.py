"""A quantized checkpoint of any layout as the float model that it stands for.

Weights become (q - zero_point) * scale, or what a layout without an integer grid says, in fp32 and
rounded once to the type asked for. Layers that are not quantized are copied bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.adapters import Lora, read_lora
from formats.adapters.factors import factors_document
from formats.adapters.merge import write_merged
from formats.adapters.settings import adapter_folder
from formats.checkpoint.compressed_tensors import UnsupportedSchemeError
from formats.checkpoint.contents import is_foreign
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.stated import StatedFolder
from formats.errors import CheckpointError, RequestError
from formats.foreign.folder import ForeignFolder
from formats.modeling.layers import embedding_name, head_name
from formats.scale_table import ScaleTable
from formats.scheme import Scheme
from formats.stored.folder import auxiliary_files, read_config
from ptq.convert import FLOAT_TYPES
from ptq.convert.conversion import Conversion, Destination, Source, surplus_tensors
from ptq.methods.common.float_model import values_of

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
