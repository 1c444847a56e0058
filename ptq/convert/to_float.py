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

from formats.checkpoint.compressed_tensors import UnsupportedSchemeError
from formats.checkpoint.contents import is_foreign
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.stated import StatedFolder
from formats.checkpoint.write import CheckpointWriter
from formats.errors import CheckpointError
from formats.foreign.folder import ForeignFolder
from formats.modeling.layers import embedding_name, head_name
from formats.scale_table import ScaleTable
from formats.scheme import Scheme
from formats.stored.folder import auxiliary_files, read_config
from kernels.numerics import dequantize
from ptq.convert import FLOAT_TYPES
from ptq.convert.conversion import Conversion, Source, parts, surplus_tensors

FLOATS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOAT_TYPES}
TYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, as transformers 5 and 4 write it


def to_float(
    path: Path,
    out: Path,
    dtype: str | None,
    force: bool,
    shard_bytes: int,
    progress: bool,
) -> Conversion:
    """Write a folder's weights in floating point; arguments as in `ptq.convert.convert.convert`.

    Raises:
        CheckpointError: nothing is quantized, the type is not known, a weight does not fit it, or
            a file is damaged.
    """
    source, scheme, modules, read = _open(path)
    key, dtype = _type(source.config, dtype)
    surplus, rounding = surplus_tensors(source, modules), 0.0
    with CheckpointWriter(
        out,
        config=source.config | {key: dtype},
        scheme=Scheme(),
        aux_files=auxiliary_files(path),
        force=force,
        shard_bytes=shard_bytes,
    ) as writer:
        for name, module in parts(source, modules, "Converting", progress):
            if module is None:
                if name not in surplus:
                    writer.add(name, source.tensor(name))
                continue
            exact = read(module)
            weight = exact.to(FLOATS[dtype])
            rounding = max(rounding, _rounding(exact, weight))
            writer.add(f"{_stored_as(source, module)}.weight", weight)
        writer.finish(ScaleTable(entries=()))
    notes = tuple(_notes(scheme, dtype, rounding))
    return Conversion(modules=len(modules), scale_rounding=rounding, notes=notes)


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
    modules, read = checkpoint.quantized_modules, partial(_own_weight, checkpoint)
    return checkpoint, checkpoint.scheme, modules, read


def _own_weight(checkpoint: Checkpoint, module: str) -> Tensor:
    weight, spec = checkpoint.weight(module), checkpoint.scheme_of(module).weights
    assert spec is not None
    return dequantize(weight.q, weight.scale, weight.zero_point, spec.block)


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
