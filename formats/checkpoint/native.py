"""Tensors of a published layout by the names that the native class has for them.

Names are changed (beginnings of them by `formats.stored.names`), and layers that lie in one tensor
cut into runs of its rows, when a folder is opened; no weight is read for that. What is computed
from a weight is computed when it is read, and float weights that lie as [in, out] are turned when
they are read and written.

Why no other software opens a checkpoint, where none does, and how one is made for others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.split import split_stored
from formats.errors import CheckpointError
from formats.families.registry import OWN_CLASSES
from formats.families.sizes import heads_of
from formats.published import TURNED, PublishedLayout, find_layout, is_turned
from formats.stored.safetensors_files import (
    Computed,
    RowsOf,
    StoredTensors,
    TensorFile,
    read_tensor,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _unit_rows(file: TensorFile, name: str) -> Computed:
    """A matrix whose rows are divided by their length: w / max(||w||, 1e-12), rounded once."""
    kind = file.tensors[name]

    def divided() -> Tensor:
        return torch.nn.functional.normalize(read_tensor(file, name).float()).to(kind[0])

    return Computed(file.path, name, kind, divided)


def _turned(file: TensorFile, name: str) -> Computed:
    """The weight of a linear layer [out, in] that is stored as [in, out]."""
    dtype, shape = file.tensors[name]
    return Computed(file.path, name, (dtype, shape[::-1]), lambda: read_tensor(file, name).T)


def own_layers(
    files: Mapping[str, StoredTensors], config: Mapping[str, Any]
) -> dict[str, TensorFile]:
    """`split_stored`, with float weights of linear layers as [out, in] where they lie as [in, out].

    Args:
        files: By the names of the native class.
    """
    return {
        name: _turned(file, name) if _is_transposed(name, file.tensors[name][0], config) else file
        for name, file in split_stored(files, config).items()
    }


def as_stored(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor as the files of its model have it: the way back from `own_layers`."""
    return tensor.T.contiguous() if _is_transposed(name, tensor.dtype, config) else tensor


def _is_transposed(name: str, dtype: torch.dtype, config: Mapping[str, Any]) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and dtype in FLOATS and is_turned(config, module)


def native_tensors(
    files: Mapping[str, StoredTensors], published: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, TensorFile]:
    """Where each tensor of the native class is read from.

    Args:
        files: By the names on disk, but for their beginnings (`formats.stored.names`).
        published: config.json as it stands there.
        config: That of the native class.

    Raises:
        CheckpointError: a tensor has another shape than the configuration says.
    """
    layout = find_layout(published)
    assert layout is not None
    renamed = dict(_rename(files, layout, config))
    found = split_stored(renamed, config)
    for module in layout.unit_rows(published):
        name = f"{module}.weight"
        if name in found:
            found[name] = _unit_rows(found[name], name)
    return found


def _rename(
    files: Mapping[str, StoredTensors], layout: PublishedLayout, config: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensors]]:
    """Each native tensor and its rows; names that the layout does not know stay as they are."""
    patterns = {
        re.compile(re.escape(module).replace(r"\{\}", r"(\d+)")): native
        for module, native in layout.modules.items()
    }
    for name, file in files.items():
        module, _, leaf = name.rpartition(".")
        if leaf in layout.buffers:
            continue
        matches = ((pattern.fullmatch(module), native) for pattern, native in patterns.items())
        found = [
            part.format(*match.groups()) for match, native in matches if match for part in native
        ]
        if not found:
            yield name, file
        for part, (first, shape) in zip(found, _cut(file, name, len(found), config), strict=True):
            own = f"{part}.{leaf}"
            yield own, RowsOf(file, name, {own: first}, shape)


def _cut(
    file: StoredTensors, name: str, parts: int, config: Mapping[str, Any]
) -> list[tuple[int, tuple[int, ...]]]:
    """First row and shape of what a tensor holds: nothing known, itself, or q, k and v."""
    shape = file.tensors[name][1]
    if parts < 2:
        return [(0, shape)] * parts
    heads = heads_of(config)
    rows = [heads.query * heads.size, heads.kv * heads.size, heads.kv * heads.size]
    if not shape or sum(rows) != shape[0]:
        raise CheckpointError(
            f"{file.path}: {name} has shape {list(shape)}; config.json says {sum(rows)} rows, "
            f"{rows} of q, k and v. The checkpoint and its config.json do not belong together"
        )
    firsts = [0, rows[0], rows[0] + rows[1]]
    return [(first, (count, *shape[1:])) for first, count in zip(firsts, rows, strict=True)]


CARD = "README.md"
FLOAT = "`ptq convert CHECKPOINT FLOAT --to float` makes a model of floats"


def only_here(
    config: Mapping[str, Any], *, quantized: bool, shares_head: bool, float_zeros: bool = False
) -> str | None:
    """Why only this runtime opens a checkpoint, and the setting that changes it; None for others.

    What others open and leave out, such as the scales of an int8 cache, is no such reason.

    Args:
        quantized: Whether weights of linear layers are.
        shares_head: Whether the quantized head is the embedding, too.
        float_zeros: Whether weights have zero points that are floats.
    """
    kind = str(config.get("model_type"))
    reasons = []
    if kind in OWN_CLASSES:
        reasons.append(
            f"transformers has no class of model_type {kind!r}, which no setting changes"
        )
    if quantized and kind in TURNED:
        reasons.append(
            f"the quantized layers of {kind} are Conv1D in transformers, which leaves these random "
            f"when it reads compressed-tensors. For others {FLOAT}"
        )
    if shares_head:
        reasons.append(
            "its quantized lm_head is the embedding, too, which others have no form for and refuse "
            "by its strategy tied_channel or tied_group. For others quantize with the method "
            "`untie` before the one that rounds, or leave lm_head in float (`ignore: "
            "[lm_head]`, or `--budget ... --target vllm`)"
        )
    if float_zeros:
        reasons.append(
            "zero points of its weights are floats, as in .gguf files, where others read integers. "
            f"For others take such a file (`ptq convert CHECKPOINT MODEL.gguf`), or {FLOAT}"
        )
    return f"Only this runtime opens it: {'; '.join(reasons)}." if reasons else None


def said_in_card(folder: Path) -> str | None:
    """The reason that the card of a folder written here gives; None where it has none."""
    path = folder / CARD
    return path.read_text(encoding="utf-8").split("\n\n")[1] if path.is_file() else None


def card(reason: str) -> str:
    """The text of a checkpoint's card."""
    return f"# A checkpoint for this runtime alone\n\n{reason}\n\n    ptq serve FOLDER\n"
