"""Writes a quantized checkpoint in another layout, and checks what it wrote.

Integers are taken over bit for bit and nothing is quantized again, but for float weights under
Paddle's tables; only scales are rounded, where the other layout holds them in fp16; the result
says by how much. The folder is read back and compared with its source before it appears. The target
`paddle` is tables of scales and no weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from formats.adapters.factors import factors_document
from formats.checkpoint.contents import is_foreign
from formats.checkpoint.native import as_stored
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RequestError
from formats.families.block_layers import HEAD
from formats.families.registry import find_family
from formats.files import building_directory, fsync_path, target_locked, write_bytes
from formats.foreign.awq import awq_config, awq_layout, refuse_awq
from formats.foreign.folder import named
from formats.foreign.fp8 import fp8_block_config, fp8_block_layout, refuse_fp8_block
from formats.foreign.gptq import Version, gptq_config, gptq_layout, refuse_gptq
from formats.foreign.layout import Layout
from formats.foreign.neural_compressor import refuse_pickle
from formats.foreign.paddle import FILES as TABLES
from formats.foreign.paddle import paddle_tables
from formats.gguf.locate import is_gguf, locate_model, locate_source
from formats.gguf.unpack import unpack
from formats.namespace import version as own_version
from formats.scheme import Scheme, has_float_zeros
from formats.stored.folder import CONFIG, SETTINGS_FILES, read_config
from formats.stored.shards import ShardWriter
from ptq.convert.conversion import Conversion, Destination, unquantized, verify
from ptq.convert.imports import import_folder, import_tables
from ptq.convert.to_float import FLOATS, merge_adapter, to_float
from ptq.convert.to_gguf import to_gguf
from ptq.output import GGUF_FILE
from ptq.recipe.schema import OutputSpec
from ptq.result import QuantizationResult

SHARD_BYTES = 2 << 30


def convert(
    source: str | Path,
    out: str | Path,
    target: str,
    *,
    tables: str | Path | None = None,
    dtype: str | None = None,
    adapter: str | Path | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Conversion:
    """Write a checkpoint in another layout; memory held is one layer and one shard.

    Args:
        source: Folder of a quantized checkpoint, its name on the hub, or a .gguf file; with
            `tables` or `adapter`, or for `gguf`, the folder of a float model, too.
        out: Folder to make; for `gguf` a file.
        target: One of `ptq.convert.TARGETS`.
        tables: Folder of PaddleNLP's tables of scales, for `compressed_tensors`.
        dtype: Type of the weights, for `float`; None for the one that config.json says.
        adapter: Folder of a LoRA adapter to merge in, for `float`, or its name on the hub.
        force: Whether an existing `out` may be replaced.
        shard_bytes: Most bytes of one weight file.
        progress: Whether to show a bar.

    Raises:
        CheckpointError: the target cannot express the checkpoint, a file is damaged, or another
            process writes to `out`; nothing is left.
    """
    source, out = locate_source(source), Path(os.path.expanduser(out))
    to = Destination(out, force, shard_bytes, progress)
    if source.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out} holds the source {source}; choose another output path")
    _check_options(target, tables=tables, dtype=dtype, adapter=adapter)
    _check_gguf(source, target, tables)
    with target_locked(out):
        _refuse_other_folder(out)
        if adapter is not None:
            source = locate_model(source, floats=True) if is_gguf(source) else source
            config, quantization, *_ = read_config(source)
            if quantization is not None:
                _refuse_stored_merged(source, config)
            return merge_adapter(source, adapter, to, dtype)
        return _convert(source, to, target, tables, dtype)


def _refuse_other_folder(out: Path) -> None:
    """Refuse to replace, with --force too, a folder that no conversion has made.

    Raises:
        CheckpointError: it is one.
    """
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if names and not {CONFIG, *TABLES} & {*names}:
        found = ", ".join(names[:3])
        raise CheckpointError(
            f"{out} exists already and holds no model that --force could replace (found {found}); "
            "choose another output path, or remove it yourself"
        )


def _convert(
    source: Path, to: Destination, target: str, tables: str | Path | None, dtype: str | None
) -> Conversion:
    """`convert` by what the source holds."""
    if is_gguf(source):
        done = unpack(
            source,
            to.out,
            floats=target == "float",
            dtype=None if dtype is None else FLOATS[dtype],
            force=to.force,
            progress=to.progress,
        )
        alone = None if target == "float" else Checkpoint.open(to.out, to_run=False).only_here
        notes = (*done.notes, *([alone] if alone else []))
        return Conversion(modules=done.kept, scale_rounding=0.0, notes=notes)
    refuse_pickle(source)
    if tables is not None:
        return import_tables(source, Path(os.path.expanduser(tables)), to)
    config, quantization, *_ = read_config(source)
    if target != "gguf":
        _refuse_stored_merged(source, config)
    if target == "float":
        return to_float(source, to, dtype)
    checkpoint, foreign = Checkpoint.open(source, to_run=False), is_foreign(quantization)
    if target == "gguf" and not foreign:
        return to_gguf(checkpoint, to.out, to.force, to.progress)
    if foreign != (target == "compressed_tensors"):
        method = (quantization or {}).get("quant_method")
        found = f"the layout {method}" if quantization else "no quantized weights"
        raise CheckpointError(
            f"{source} has {found} and is not converted to {target}. Convert from "
            "compressed-tensors to another layout, or from another to compressed_tensors; a float "
            "model with PaddleNLP's scales to compressed_tensors with --tables"
        )
    if foreign:
        return import_folder(checkpoint, quantization or {}, to)
    _refuse_float_zeros(checkpoint, target)
    if target == "paddle":
        return _export_tables(checkpoint, to)
    return _export(checkpoint, to, target)


def _refuse_stored_merged(source: Path, config: Mapping[str, Any]) -> None:
    family = find_family(config)
    if family is not None and family.stored_merged:
        raise CheckpointError(
            f"{source}: checkpoints of model_type {config['model_type']!r} hold "
            f"{' and '.join(family.stored_merged)} in the place of their parts, which is not "
            "converted. Serve the checkpoint as it is, or quantize the original model with one of "
            "the shipped recipes"
        )


def _refuse_float_zeros(source: Checkpoint, target: str) -> None:
    """Refuse weights of a .gguf file that have minima in the place of integer zero points."""
    if has_float_zeros(map(source.scheme_of, source.quantized_modules)):
        raise CheckpointError(
            f"{source.path}: found float zero points, those of a .gguf file; {target} holds "
            "integer ones. Make a float model of it with --to float, and quantize that"
        )


def _check_options(
    target: str, tables: str | Path | None, dtype: str | None, adapter: str | Path | None
) -> None:
    goes_with = {"tables": "compressed_tensors", "dtype": "float", "adapter": "float"}
    given = {"tables": tables, "dtype": dtype, "adapter": adapter}
    for option, of in goes_with.items():
        if given[option] is not None and target != of:
            raise RequestError(f"--{option} goes with --to {of}, not with --to {target}")
    if dtype is not None and dtype not in FLOATS:
        raise RequestError(f"dtype: found {dtype!r}; allowed: {', '.join(FLOATS)}", "dtype")


def _check_gguf(source: Path, target: str, tables: str | Path | None) -> None:
    fits = target in ("compressed_tensors", "float") and tables is None
    if is_gguf(source) and not fits:
        raise CheckpointError(
            f"{source}: a GGUF file is converted to compressed_tensors or float, without "
            f"--tables; found --to {target}. Convert it to compressed_tensors first, then that"
        )


def _export_tables(checkpoint: Checkpoint, to: Destination) -> Conversion:
    _refuse_head(checkpoint, "paddle")
    tables = paddle_tables(checkpoint)
    with building_directory(to.out, replace=to.force) as folder:
        for name, table in tables.items():
            write_bytes(folder / name, (json.dumps(table, indent=1) + "\n").encode())
            if json.loads((folder / name).read_bytes()) != table:
                raise CheckpointError(f"{name} was read back with other numbers; check the disk")
    note = (
        "These are the tables of scales only; weights, config.json and tokenizer are not converted."
    )
    modules = len(checkpoint.quantized_modules)
    return Conversion(modules=modules, scale_rounding=0.0, notes=(note,))


def _export(source: Checkpoint, to: Destination, target: str) -> Conversion:
    modules = source.quantized_modules
    rest, head = unquantized(source, modules), HEAD in modules
    layout, quantization = _target(target, source.scheme, rest, head)
    source.require_one_scheme(target)
    _refuse_head(source, target)
    with building_directory(to.out, replace=to.force) as folder:
        shards = ShardWriter(folder, to.shard_bytes)

        def add(name: str, tensor: Tensor) -> None:
            shards.add(name, as_stored(name, tensor, source.config))

        for module in to.layers(source, modules, add):
            with named(module):
                assert layout.pack is not None
                for leaf, tensor in layout.pack(source.weight(module)).items():
                    shards.add(f"{module}.{leaf}", tensor)
        shards.finish()
        _write_documents(folder, source, quantization)
        rounding = verify(folder, source, to.progress)
    notes = tuple(_export_notes(target, source.scheme))
    return Conversion(modules=len(modules), scale_rounding=rounding, notes=notes)


def _refuse_head(source: Checkpoint, target: str) -> None:
    """Refuse a quantized head that a target does not express."""
    if HEAD in source.quantized_modules and (source.shares_head or not target.startswith("gptq")):
        both = ", which is the embedding, too" if source.shares_head else ""
        raise CheckpointError(
            f"{source.path}: found quantized weights in {HEAD}{both}; {target} does not hold them. "
            "Quantize with a recipe that leaves lm_head in float, or serve the checkpoint as it is"
        )


def _target(
    target: str, scheme: Scheme, unquantized: Sequence[str], head: bool
) -> tuple[Layout, dict[str, Any]]:
    """A target's layout and `quantization_config`; CheckpointError if it cannot hold the scheme."""
    {"awq": refuse_awq, "fp8_block": refuse_fp8_block}.get(target, refuse_gptq)(scheme)
    spec = scheme.weights
    assert spec is not None
    if target == "awq":
        return awq_layout(spec), awq_config(spec, unquantized)
    if target == "fp8_block":
        return fp8_block_layout(), fp8_block_config(unquantized)
    version: Version = 2 if target == "gptq_v2" else 1
    quantizer = f"ptq:{own_version()}"
    return gptq_layout(spec, version), gptq_config(
        spec, version=version, quantizer=quantizer, unquantized=unquantized, head=head
    )


def _write_documents(folder: Path, source: Checkpoint, quantization: dict[str, Any]) -> None:
    for file in source.auxiliary_files:
        shutil.copyfile(file, folder / file.name)
        fsync_path(folder / file.name)
    documents = {"config.json": source.config | {"quantization_config": quantization}}
    if quantization["quant_method"] == "gptq":
        documents[SETTINGS_FILES[0]] = quantization
    for name, value in documents.items():
        write_bytes(folder / name, (json.dumps(value, indent=2) + "\n").encode())
    for name, data in factors_document(source.path).items():
        (folder / name).parent.mkdir()
        write_bytes(folder / name, data)


def _export_notes(target: str, scheme: Scheme) -> Iterator[str]:
    if scheme.kv_cache is not None:
        yield (
            f"The scheme of the cache ({scheme.kv_cache.text}) and "
            f"its scales are not part of the {target} format and were left out: whoever loads it "
            "keeps the cache as it does by default."
        )
    if scheme.states is not None:
        yield f"Recurrent states are kept in float: the {target} format knows no other way."
    if target.startswith("gptq") and scheme.weights and not scheme.weights.symmetric:
        yield (
            "Weights are asymmetric: vLLM refuses such GPTQ checkpoints, and GPTQModel takes "
            "version 1 only from itself; for it, use gptq_v2."
        )


def write_beside(result: QuantizationResult, wanted: OutputSpec, *, progress: bool) -> list[str]:
    """Write the other layouts of a run's checkpoint that its recipe asks for; lines of `describe`.

    Raises:
        CheckpointError: the disk refuses.
    """
    if wanted.format != "gguf":
        return []
    out = result.checkpoint.parent / GGUF_FILE
    done = to_gguf(Checkpoint.open(result.checkpoint), out, force=True, progress=progress)
    return describe(done, out, "gguf")


def describe(done: Conversion, out: Path, target: str) -> list[str]:
    """Lines for a terminal, of what `convert` returned."""
    return [f"{out}: {_made(done, target)}", *done.notes]


def _made(done: Conversion, target: str) -> str:
    most = f", by at most {done.scale_rounding:.2g} of their value" * bool(done.scale_rounding)
    if target == "paddle":
        return f"tables of scales of {done.modules} quantized layers"
    if not done.modules:
        return "a float model"
    if target == "float":
        weights = f"rounded{most}" if most else "exact"
        return f"a float model of {done.modules} layers, weights {weights}"
    if done.rounded:
        return f"{done.modules} layers, rounded to the nearest with given scales"
    scales = "in fp16" if target == "gguf" else f"rounded to fp16{most}" if most else "exact"
    integers = "integers equal to the source's bit for bit"
    return f"{done.modules} quantized layers, {integers}; scales {scales}"
