"""A checkpoint of ours as a .gguf file, its integers bit for bit.

    int4 in groups, symmetric            Q4_0
    int4 in groups with zero points      Q4_1, of floats where fp16 holds their minima
    int4 in super-blocks                 Q4_K
    int8, groups or channels             Q8_0
    everything else                      BF16 or F16, as the model's type is; vectors F32

Blocks there have 32 weights: larger groups, and channels, are so many blocks with one scale.
Scales are rounded to fp16, in which blocks hold them. There is no place for static scales of inputs
and of the cache: llama.cpp scales inputs by itself, and keeps the cache as it is asked to.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, HEAD, any_expert, expert_of
from formats.families.family import Attention, Family
from formats.families.registry import BY_TYPE
from formats.families.values import named_dtype
from formats.files import fsync_path, writing
from formats.foreign.layout import named
from formats.gguf.architectures import ARCHITECTURES, file_name, neighbours, tensor_names
from formats.gguf.blocks import BLOCK, packed
from formats.gguf.file import GgufFile
from formats.gguf.metadata import (
    architecture_of,
    model_metadata,
    require_writer,
    rope_tensors,
    tokenizer_metadata,
)
from formats.namespace import later
from formats.scheme import SUPER_BLOCK, WeightSpec
from ptq.convert.conversion import Conversion
from ptq.methods.common.float_model import values_of
from ptq.output import title_of

with later():
    import gguf

PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file, to be made when it is written.

    Attributes:
        name: Its name there.
        kind: Its type there.
        shape: Its shape, rows before columns.
        read: Makes its numbers, of blocks their bytes.
        rounded: Quantized layers in it, or parts of such, that no type of blocks holds: floats.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    rounded: int = 0


def to_gguf(source: Checkpoint, out: Path, force: bool, progress: bool) -> Conversion:
    """Write the file; memory held is one tensor, of a mixture those of a block's experts.

    Raises:
        CheckpointError: the package gguf is not installed, `out` exists, or llama.cpp has no such
            architecture, tokenizer or tensor; nothing is left.
    """
    if out.suffix.lower() != ".gguf":
        raise CheckpointError(f"{out}: a GGUF file's name ends in .gguf; give such a name")
    if out.exists() and not force:
        raise CheckpointError(f"{out} exists; give another name, or --force to replace it")
    require_writer()
    with named(str(source.path)):
        values = model_metadata(source.config)
    tokenizer, note = tokenizer_metadata(source.path, source.config["vocab_size"])
    tensors = list(_tensors(source))
    part = out.with_name(f".{out.name}.part")
    kinds = Counter(tensor.kind for tensor in tensors)
    rounded = sum(tensor.rounded for tensor in tensors)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(part, values["general.architecture"])
            writer.add_name(title_of(source.path))
            _add(writer, values | tokenizer)
            written = _add_tensors(writer, tensors, progress)
            _require_same(part, written)
            fsync_path(part)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    return Conversion(
        modules=len(source.quantized_modules) - rounded,
        scale_rounding=0.0,
        notes=tuple(_notes(source, kinds, rounded, note)),
    )


def _add(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Add values by their key, in the types that llama.cpp reads."""
    for key, value in values.items():
        if key == "general.architecture":
            continue  # the writer has it
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _require_same(path: Path, written: dict[str, bytes]) -> None:
    """Read a file back and compare its tensors with what was written, by their SHA-256."""
    found = GgufFile(path).tensors
    for name, digest in written.items():
        if hashlib.sha256(np.ascontiguousarray(found[name].data).data).digest() != digest:
            raise CheckpointError(f"{name} was read back with other bits; check the disk")


def _add_tensors(
    writer: gguf.GGUFWriter, tensors: list[FileTensor], progress: bool
) -> dict[str, bytes]:
    """Add all tensors and close the file; their SHA-256 by name."""
    sizes = gguf.GGML_QUANT_SIZES
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        block, nbytes = sizes[kind]
        count = int(np.prod(tensor.shape))
        raw = tensor.kind not in ("F32", "F16")
        row = tensor.shape[-1] // block * nbytes
        shape = (*tensor.shape[:-1], row) if raw else tensor.shape
        dtype = {"F32": np.float32, "F16": np.float16}.get(tensor.kind, np.uint8)
        writer.add_tensor_info(
            tensor.name, shape, np.dtype(dtype), count // block * nbytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    digests: dict[str, bytes] = {}
    for tensor in bar(tensors, title="Writing", unit="tensor", shown=progress):
        numbers = np.ascontiguousarray(tensor.read())
        digests[tensor.name] = hashlib.sha256(numbers.data).digest()
        writer.write_tensor_data(numbers)
    writer.close()
    return digests


def _tensors(source: Checkpoint) -> Iterator[FileTensor]:
    """The file's tensors, of a checkpoint's layers and of its other tensors."""
    config = source.config
    family = BY_TYPE[config["model_type"]]
    names = tensor_names(family)
    attention = family.attention
    assert isinstance(attention, Attention)
    architecture = ARCHITECTURES[architecture_of(config)]
    permuted = architecture.permuted
    tied = architecture.needs_head and f"{HEAD}.weight" not in set(_names(source))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    counts = dict(zip(attention.qkv[:2], heads, strict=True)) if permuted else {}
    parts = {
        p: merged for merged, own in family.merged if merged in family.stored_merged for p in own
    }

    def stored_in(name: str) -> str:
        """The tensor of the file that one of the checkpoint's goes into."""
        module, _, leaf = any_expert(name, ".{}").rpartition(".")
        parent, _, last = module.rpartition(".")
        merged = f"{parent}.{parts[last]}" if last in parts else module
        return f"{merged}.{leaf}"

    own = sorted(_names(source), key=lambda name: (stored_in(name), expert_of(name) or 0))
    for whole, group in groupby(own, stored_in):
        members = list(group)
        name = file_name(whole, names)
        if name is None:
            raise CheckpointError(f"{source.path}: {members[0]} has no place in a GGUF file")
        made = _tensor(source, family, name, _in_order(members, family), counts)
        yield made
        if name == "token_embd.weight" and tied:
            yield replace(made, name="output.weight", rounded=0)
    for name, values in rope_tensors(config).items():
        yield FileTensor(name, "F32", values.shape, lambda values=values: values)


def _in_order(members: list[str], family: Family) -> list[str]:
    """Parts of a merged layer in the order in which they merge."""
    order = {part: i for _, own in family.merged for i, part in enumerate(own)}
    return sorted(members, key=lambda n: (expert_of(n) or 0, order.get(n.split(".")[-2], 0)))


def _names(source: Checkpoint) -> Iterator[str]:
    """Weights, biases and norms by name; a quantized layer's weight once."""
    quantized = set(source.quantized_modules)
    for module in source.quantized_modules:
        shared = module == HEAD and source.shares_head
        yield f"{EMBEDDING if shared else module}.weight"
    for name in source.names():
        module, _, leaf = name.rpartition(".")
        if module not in quantized or leaf == "bias":
            yield name


def _tensor(
    source: Checkpoint, family: Family, name: str, members: list[str], counts: dict[str, int]
) -> FileTensor:
    """One tensor of the file, of the parts or experts that it is made of."""
    quantized = source.quantized_modules
    shared = members == [f"{EMBEDDING}.weight"] and source.shares_head
    modules = [HEAD if shared else member.rpartition(".")[0] for member in members]
    stacked = name.endswith("_exps.weight")
    columns = source.weight_shape(modules[0])[-1] if name.endswith(".weight") else 0
    weights = members[0].endswith(".weight")
    shapes = list(map(source.weight_shape, modules) if weights else map(source.shape, members))
    first = shapes[0]
    rows = sum(own[0] for own in shapes)
    shape = (len(members), *first) if stacked else (rows, *first[1:])
    order, lost = _order(modules[0], first[0], counts), 0
    if weights and modules[0] in quantized:
        spec = source.scheme_of(modules[0]).weights
        assert spec is not None
        kind = _kind(spec, columns)
        if kind is None or (spec.float_zeros and not _fits(source, modules, kind)):
            kind, lost = PLAIN[_float_type(source)], len(modules)
    elif len(first) == 1:
        kind = "F32"
    else:
        kind = PLAIN[source.dtype(members[0])]

    def read() -> np.ndarray:
        made = [
            _numbers(source, family, member, module, kind, order)
            for member, module in zip(members, modules, strict=True)
        ]
        return np.stack(made) if stacked else np.concatenate(made)

    return FileTensor(name, kind, shape, read, lost)


def _order(module: str, rows: int, counts: dict[str, int]) -> np.ndarray | None:
    """Which row each row of the file is; None where they lie there as here."""
    heads = counts.get(module.rpartition(".")[2])
    return None if heads is None else neighbours(rows, heads)


def _kind(spec: WeightSpec, columns: int) -> str | None:
    """Type of a layer's blocks; None where no type holds it."""
    if columns % BLOCK or spec.granularity not in ("group", "per_channel"):
        return None
    if (spec.group_size or BLOCK) % BLOCK:
        return None
    if spec.super_blocks:
        return None if columns % SUPER_BLOCK else "Q4_K"
    if spec.dtype == "int4":
        return "Q4_0" if spec.symmetric else "Q4_1"
    return "Q8_0" if spec.dtype == "int8" and spec.symmetric else None


def _fits(source: Checkpoint, modules: list[str], kind: str) -> bool:
    """Whether blocks of a type hold layers whose zero points are floats."""
    try:
        for module in modules:
            packed(kind, source.weight(module))
    except ValueError:
        return False
    return True


def _float_type(source: Checkpoint) -> torch.dtype:
    found = named_dtype(source.config)
    return {"float32": torch.float32, "float16": torch.float16}.get(str(found), torch.bfloat16)


def _numbers(
    source: Checkpoint, family: Family, name: str, module: str, kind: str, order: np.ndarray | None
) -> np.ndarray:
    """What a tensor holds in the file."""
    rows = None if order is None else torch.from_numpy(order)
    if kind not in PLAIN.values():
        weight = source.weight(module)
        if weight.order is not None:
            raise CheckpointError(f"{module}: its groups are no neighbouring inputs (act-order)")
        try:
            return packed(kind, weight if rows is None else weight.rows(rows))
        except ValueError as error:
            raise CheckpointError(
                f"{module}: {error}. Keep the compressed-tensors layout"
            ) from error
    values = _floats(source, name, module)
    if rows is not None:
        values = values[rows]
    if module.rpartition(".")[2].endswith("norm") and name.endswith(".weight"):
        values = values.float() + family.norms.offset
    if kind == "BF16":
        return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return values.to(torch.float16 if kind == "F16" else torch.float32).numpy()


def _floats(source: Checkpoint, name: str, module: str) -> Tensor:
    if not name.endswith(".weight") or module not in source.quantized_modules:
        return source.tensor(name)
    return values_of(source, module)


def _notes(
    source: Checkpoint, kinds: Counter[str], rounded: int, note: str | None
) -> Iterator[str]:
    made = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common())
    yield f"Tensors: {made}."
    if rounded:
        yield (
            f"{rounded} more quantized layers, which no type of blocks holds as they are, became "
            f"floats, rounded to {PLAIN[_float_type(source)]}."
        )
    if source.scheme.activations is not None and not source.scheme.activations.dynamic:
        yield "Static scales of inputs are left out: llama.cpp scales each block of 32 by itself."
    if source.scheme.kv_cache is not None:
        yield (
            f"The scheme of the cache ({source.scheme.kv_cache.text}) and its scales are left out: "
            "llama.cpp keeps it in fp16, or as --cache-type-k and --cache-type-v say."
        )
    if note is not None:
        yield note
