"""A folder of ours out of a .gguf file.

Linear layers of the types of `formats.gguf.blocks` keep their integers and scales, in their groups,
and so does the head where its type is one of these, with the embedding where they are one tensor.
Layers that read one input, which run as one, are stored alike: as int4 where all have 4 bits, else
as int8, which holds all of these types. All other matrices are dequantized by the package `gguf`:
other K- and I-quants, and layers that read one input with such a one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from formats.checkpoint.write import CheckpointWriter
from formats.command import bar
from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, HEAD, is_projection
from formats.families.family import Attention, Family
from formats.gguf.architectures import (
    NOT_WEIGHTS,
    find_architecture,
    neighbours,
    own_name,
    settings,
    tensor_names,
)
from formats.gguf.blocks import has_negative_scales, scheme_of, unpacked
from formats.gguf.file import GgufFile, Stored
from formats.gguf.tokenizer import token_ids, tokenizer_documents
from formats.namespace import later
from formats.scale_table import ScaleEntry, ScaleTable, unmeasured_entry
from formats.scheme import LayerScheme, Scheme
from formats.stored.weights import StoredWeight, scale_in_table

with later():
    import gguf
    import transformers

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Part:
    """A tensor of the folder, as it is in the file.

    Attributes:
        name: Its full name here.
        stored: The file's type and numbers, those of this tensor alone.
        order: Which row of these each of its rows is; None where they lie as here.
    """

    name: str
    stored: Stored
    order: np.ndarray | None = None

    @property
    def module(self) -> str:
        """Full name of its module."""
        return self.name.rpartition(".")[0]

    def numbers(self) -> np.ndarray:
        """Its numbers, or the bytes of its blocks, in the order of its rows here."""
        return self.stored.data if self.order is None else self.stored.data[self.order]


@dataclass
class Unpacked:
    """What became of a file.

    Attributes:
        kept: How many layers kept their integers.
        dequantized: How many matrices were dequantized, by their type in the file.
    """

    kept: int = 0
    dequantized: Counter[str] = field(default_factory=Counter)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the folder should know, each a sentence."""
        made = ", ".join(f"{count} in {kind}" for kind, count in self.dequantized.most_common())
        return (f"Matrices became floats: {made}.",) if made else ()


def unpack(
    path: Path,
    out: Path,
    *,
    floats: bool = False,
    dtype: torch.dtype | None = None,
    force: bool = False,
    progress: bool = False,
) -> Unpacked:
    """Write the folder; memory held is one shard.

    Args:
        path: The .gguf file.
        out: The folder to make.
        floats: Whether integers become floats, too.
        dtype: Of matrices that are floats; default: that of the file's own, or fp16.
        force: Whether an existing `out` may be replaced.
        progress: Whether to show a bar.

    Raises:
        CheckpointError: the file or its architecture is not read here, tensors are missing or not
            known; nothing is left.
    """
    file = GgufFile(path)
    values, family = settings(file)
    documents = tokenizer_documents(file)
    parts = list(_parts(file, family, values))
    shared = values["tie_word_embeddings"]
    layers = _schemes(parts, family, tied=shared)
    if floats or set(layers) == {HEAD}:  # of which nothing else is quantized is a float model
        layers = {}
    own = dtype or _float_type(file)
    wide = dtype is None and own == torch.float16 and find_architecture(file).wide
    done, rows = Unpacked(), list[ScaleEntry]()
    with CheckpointWriter(
        out,
        config=_config(values | token_ids(file), torch.bfloat16 if wide else own),
        scheme=_main(layers),
        layers=layers if HEAD in layers or len(set(layers.values())) > 1 else None,
        ignore=[p.module for p in parts if p.module not in layers and is_projection(p.module)],
        shared_head=HEAD if shared and HEAD in layers else None,
        force=force,
    ) as writer:
        for part in bar(parts, title="Reading", unit="tensor", shown=progress):
            head = shared and part.module == EMBEDDING
            module = HEAD if head else part.module
            if part.name.endswith(".weight") and module in layers:
                weight = _weight(path, part, layers[module])
                writer.add_linear(module, weight, torch.float16)
                rows.append(_row(module, weight, layers[module]))
                done.kept += 1
            else:
                writer.add(part.name, _float(part, family, own, done))
        writer.finish(ScaleTable(entries=tuple(rows)), documents)
    return done


def _config(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json: the settings, and those that transformers adds for the model's type."""
    general = transformers.PretrainedConfig().to_dict().keys() - values.keys()
    try:
        made = transformers.AutoConfig.for_model(**values).to_dict()
    except (ArithmeticError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(
            f"transformers takes no such settings ({' '.join(str(error).split())}); get the file "
            "again"
        ) from error
    made = {key: value for key, value in made.items() if key not in general}
    classes = {"gemma3_text": "Gemma3ForCausalLM"}
    spelled = "".join(part.capitalize() for part in values["model_type"].split("_"))
    return made | {
        "architectures": [classes.get(values["model_type"], f"{spelled}ForCausalLM")],
        "dtype": str(dtype).removeprefix("torch."),
    }


def _float_type(file: GgufFile) -> torch.dtype:
    """Type of the folder's float weights: that of the file's, fp16 of dequantized ones."""
    kinds = {stored.kind for stored in file.tensors.values() if len(stored.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.bfloat16 if "BF16" in kinds else torch.float16


def _parts(file: GgufFile, family: Family, values: dict[str, Any]) -> Iterator[Part]:
    """The folder's tensors: experts one by one, merged layers in their parts, rows in our order.

    Raises:
        CheckpointError: a tensor is not known.
    """
    names, permuted = tensor_names(family), find_architecture(file).permuted
    heads = {"q": values["num_attention_heads"], "k": values["num_key_value_heads"]}
    attention, mlp = family.attention, family.feed_forward
    assert isinstance(attention, Attention)
    cut = {
        attention.merged: (attention.qkv, [heads["q"], heads["k"], heads["k"]]),
        mlp.merged: (mlp.gate_up, [1, 1]),
    }
    for name, stored in file.tensors.items():
        if name in NOT_WEIGHTS:
            continue
        own = own_name(name, names)
        if own is None:
            raise CheckpointError(
                f"{file.path}: found the tensor {name}, which {file.architecture} models have not "
                "here. Update ptq, or give the folder of the original model"
            )
        module, _, leaf = own.rpartition(".")
        parent, _, last = module.rpartition(".")
        if "{}" in own:
            for expert in range(stored.shape[0]):
                one = Stored(stored.kind, stored.shape[1:], stored.data[expert])
                yield Part(own.format(expert), one)
        elif last in cut and last in family.stored_merged:
            parts, sizes = cut[last]
            _check_rows(file, name, stored, sum(sizes))
            unit, first = stored.shape[0] // sum(sizes), 0
            for part, size in zip(parts, sizes, strict=True):
                rows = slice(first, first + unit * size)
                yield Part(f"{parent}.{part}.{leaf}", _rows(stored, rows))
                first = rows.stop
        elif family.mixture is not None and last == family.mixture.shared_gate:
            row = stored.data.reshape(1, -1)  # one output, which files hold as a vector
            yield Part(own, Stored(stored.kind, (1, stored.shape[-1]), row))
        elif permuted and last in attention.qkv[:2]:
            count = heads["q" if last == attention.q else "k"]
            _check_rows(file, name, stored, 2 * count)
            yield Part(own, stored, np.argsort(neighbours(stored.shape[0], count)))
        else:
            yield Part(own, stored)


def _check_rows(file: GgufFile, name: str, stored: Stored, divisor: int) -> None:
    if stored.shape[0] % divisor:
        raise CheckpointError(
            f"{file.path}: {name} has {stored.shape[0]} rows, which {divisor} does not divide as "
            "its heads ask for; get the file again"
        )


def _rows(stored: Stored, rows: slice) -> Stored:
    data = stored.data[rows]
    return Stored(stored.kind, (len(data), *stored.shape[1:]), data)


def _schemes(parts: list[Part], family: Family, *, tied: bool) -> dict[str, LayerScheme]:
    """Layers that keep their integers, with how they are stored."""
    attention = family.attention
    assert isinstance(attention, Attention)
    runs = [attention.qkv, *(layer.gate_up for layer in family.feed_forwards)]
    first = {leaf: run[0] for run in runs for leaf in run}
    together: dict[str, dict[str, str]] = {}  # types of modules, by the first of those that merge
    for part in parts:
        module = HEAD if tied and part.module == EMBEDDING else part.module
        if part.name.endswith(".weight") and (is_projection(module) or module == HEAD):
            parent, _, leaf = module.rpartition(".")
            together.setdefault(f"{parent}.{first.get(leaf, leaf)}", {})[module] = part.stored.kind
    signed = any(
        has_negative_scales("Q4_0", part.stored.data)
        for part in parts
        if part.stored.kind == "Q4_0" and len(part.stored.shape) == 2
    )
    found: dict[str, LayerScheme] = {}
    for kinds in together.values():
        scheme = scheme_of(kinds.values(), signed=signed)
        if scheme is not None:
            found |= dict.fromkeys(kinds, scheme)
    return found


def _weight(path: Path, part: Part, scheme: LayerScheme) -> StoredWeight:
    try:
        return unpacked(part.stored.kind, part.numbers(), scheme)
    except ValueError as error:
        raise CheckpointError(f"{path}: {part.name}: {error}; get the file again") from error


def _main(layers: dict[str, LayerScheme]) -> Scheme:
    """The scheme that most layers but the head have."""
    if not layers:
        return Scheme()
    inside = [scheme for module, scheme in layers.items() if module != HEAD]
    ((most, _),) = Counter(inside).most_common(1)
    return Scheme(weights=most.weights)


def _float(part: Part, family: Family, dtype: torch.dtype, done: Unpacked) -> Tensor:
    """A tensor in floats: matrices in the folder's type, vectors in fp32 where that holds less."""
    stored = part.stored
    if stored.kind in FLOATS:
        raw = torch.from_numpy(part.numbers().copy())
        values = raw.view(FLOATS[stored.kind]).reshape(stored.shape)
    else:
        kind = gguf.GGMLQuantizationType[stored.kind]
        values = torch.from_numpy(gguf.dequantize(part.numbers(), kind)).reshape(stored.shape)
        done.dequantized[stored.kind] += 1
    if len(stored.shape) > 1:
        return values.to(dtype)
    if part.module.rpartition(".")[2].endswith("norm"):
        values = values.float() - family.norms.offset
    narrow = values.to(dtype)
    return narrow if torch.equal(narrow.to(values.dtype), values) else values.float()


def _row(module: str, weight: StoredWeight, scheme: LayerScheme) -> ScaleEntry:
    spec = scheme.weights
    assert spec is not None
    steps = weight.q.view(*weight.scale.shape, -1).float()
    if weight.zero_point is not None:
        steps = steps - weight.zero_point[..., None]
    absmax = (steps.abs().amax(dim=-1) * weight.scale).max().item()
    name, scale = f"{module}.weight_scale", scale_in_table(spec, weight)
    return unmeasured_entry(name, "weight", scale, spec.dtype, spec.granularity, absmax)
