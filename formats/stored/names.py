"""Tensors of a folder by the names that the native class has for them, where only these differ.

A layout of `formats.published` may have other beginnings, and transformers' `AutoModel` saves a
model without its head, whose names lack the first part of those of the model with one: `layers.0`
in the place of `model.layers.0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.families.block_layers import block_of
from formats.modeling.layers import embedding_name, head_name, tied_in_blocks
from formats.published import find_layout
from formats.stored.safetensors_files import RowsOf, StoredTensors, TensorFile, open_weights

USUAL = ("model.", "transformer.")  # where these are, no model's code has to be asked


def renamed(file: StoredTensors, stored: str, name: str) -> StoredTensors:
    """A tensor of a file by another name than it has there."""
    return RowsOf(file, stored, {name: 0}, file.tensors[stored][1])


def open_native(
    path: Path, config: Mapping[str, Any], published: Mapping[str, Any] | None
) -> dict[str, StoredTensors]:
    """The file of every tensor of a folder, by names of the native class.

    Args:
        config: config.json of the native class.
        published: config.json as it stands there, where that is of another.

    Raises:
        CheckpointError: as of `open_weights`.
    """
    files = open_weights(path)
    layout = find_layout(published or {})
    if layout is not None:
        names = {name: _native(name, layout.prefixes) for name in files}
    else:
        names = _with_prefix(files, config)
    return {
        own: files[name] if own == name else renamed(files[name], name, own)
        for name, own in names.items()
        if own is not None
    }


def _native(name: str, prefixes: Mapping[str, str | None]) -> str | None:
    """A tensor's native name; None of one that the native class has not."""
    for prefix, native in prefixes.items():
        if name.startswith(prefix):
            return None if native is None else native + name.removeprefix(prefix)
    return name


def _with_prefix(
    files: Mapping[str, StoredTensors], config: Mapping[str, Any]
) -> dict[str, str | None]:
    """Native names, with the first part that the files of a model without its head lack."""
    same: dict[str, str | None] = {name: name for name in files}
    if any(name.startswith(USUAL) for name in files):
        return same
    try:
        embedding = f"{embedding_name(config)}.weight"
    except CheckpointError:  # no model of its own, as a head that drafts
        return same
    first, _, rest = embedding.partition(".")
    if embedding in files or rest not in files:
        return {name: name for name in files}
    head = f"{head_name(config)}."
    return {name: name if name.startswith(head) else f"{first}.{name}" for name in files}


def copy_shared(
    found: dict[str, TensorFile], files: Mapping[str, StoredTensors], config: Mapping[str, Any]
) -> None:
    """Let every block have what it shares with an earlier one (Zamba), as its files may lack it.

    Blocks are quantized, and stored, each with its own then. A model whose blocks have tensors of
    the same names shares none, and its code is not looked at.
    """
    inside: dict[str, set[str]] = {}
    for name in found:
        if (block := block_of(name)) is not None:
            inside.setdefault(block, set()).add(name.removeprefix(block))
    if len({frozenset(names) for names in inside.values()}) < 2:
        return
    there = {name.rpartition(".")[0] for name in found}
    for name, other in tied_in_blocks(config).items():
        if other in files and name.rpartition(".")[0] not in there:
            found[name] = renamed(files[other], other, name)
