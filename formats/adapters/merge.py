"""Adapters merged into the float weights of their base: W + s B A in fp32, rounded once.

A merged model is a folder like any other. What is quantized with an adapter is such a folder, made
when it is asked for first, and kept (`formats.files.made_once`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from formats.adapters.factors import factors_document
from formats.adapters.lora import Lora, read_lora
from formats.adapters.settings import adapter_folder
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.command import bar
from formats.errors import CheckpointError, typed
from formats.files import made_once
from formats.scale_table import ScaleTable
from formats.scheme import Scheme

LAYOUT = 1  # of the folders that are made; a change of it makes them again
SHARD_BYTES = 2 << 30


def merged_folder(model: Path, adapter: str | Path) -> Path:
    """The folder of a model with an adapter merged in.

    Args:
        model: Folder of the adapter's base, of floats.
        adapter: Its folder, or its name on the hub.

    Raises:
        CheckpointError: as of `write_merged`.
    """
    model, own = model.resolve(), adapter_folder(adapter).resolve()
    files = sorted(path for folder in (model, own) for path in folder.iterdir() if path.is_file())
    states = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    seen = "\n".join([*states, str(LAYOUT)])
    make = partial(write_merged, model, own, progress=True)
    return made_once("merged", f"{model.name}-{own.name}", seen, make)


def write_merged(
    model: Path,
    adapter: str | Path,
    out: Path,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Lora:
    """Write a float model with an adapter merged in; memory held is one shard.

    Args:
        model: Folder of the adapter's base, of floats.
        adapter: Its folder, or its name on the hub.
        out: The folder to make.
        force: Whether an existing `out` may be replaced.
        shard_bytes: Most bytes of one weight file.

    Returns:
        The adapter.

    Raises:
        CheckpointError: as of `read_lora`, or the model is quantized; nothing is left.
    """
    checkpoint = Checkpoint.open(model)
    if checkpoint.scheme.quantizes_anything:
        raise CheckpointError(
            f"{model}: found {checkpoint.scheme.wac}; an adapter is merged into floats. Make them "
            f"first: {typed('convert', model, 'FLOAT', '--to', 'float', '--adapter', adapter)}"
        )
    lora = read_lora(adapter, checkpoint)
    with CheckpointWriter(
        out,
        config=checkpoint.config,
        scheme=Scheme(),
        aux_files=checkpoint.auxiliary_files,
        force=force,
        shard_bytes=shard_bytes,
    ) as writer:
        for name in bar(checkpoint.names(), title="Merging", unit="tensor", shown=progress):
            writer.add(name, lora.merged_tensor(name, checkpoint.tensor(name)))
        writer.finish(ScaleTable(entries=()), factors_document(model))
    return lora
