"""Checkpoints of random weights on a disk: those of `inference.bench.random_model`, written once.

Tensors are made and written one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from formats.checkpoint.write import CheckpointWriter
from formats.errors import RequestError
from formats.families.names import is_projection
from formats.scale_table import Role, ScaleEntry, ScaleTable, unmeasured_entry
from formats.stored.weights import scale_in_table
from inference.bench.random_model import ABSMAX, ROLES, RandomCheckpoint, words_of
from inference.bench.shapes import read_scheme, read_shape

VERSION = 1  # of the numbers; raise it when they change, as a folder that is there is taken
SHARD_BYTES = 256 << 20


def random_checkpoint(work: Path, shape: str, scheme: str, *, quantize_head: bool = False) -> Path:
    """Write a checkpoint of random weights below `work`, or find the one that is there.

    Args:
        work: Folder of such checkpoints; their names tell shape and scheme.
        shape: As in `read_shape`.
        scheme: As in `read_scheme`.
        quantize_head: Quantize the head too: int8, its input per token.

    Returns:
        Its folder.

    Raises:
        RequestError: the shape or scheme is unknown, or there is no head to quantize.
        CheckpointError: the disk refuses.
    """
    name, config = read_shape(shape)
    of_all = read_scheme(scheme)
    if quantize_head and (of_all.weights is None or config.get("tie_word_embeddings", False)):
        raise RequestError(
            f"quantize_head: found scheme {scheme} and tie_word_embeddings "
            f"{config.get('tie_word_embeddings', False)}; a head is quantized where weights are, "
            "and where the embedding is not the head as well",
            "quantize_head",
        )
    key = json.dumps([config, of_all.model_dump(mode="json"), VERSION], sort_keys=True)
    parts = [name, scheme, *(["head8"] if quantize_head else [])]
    out = work / "-".join([*parts, hashlib.sha256(key.encode()).hexdigest()[:8]])
    if not out.exists():
        _write(out, RandomCheckpoint(shape, scheme, "cpu", quantize_head=quantize_head))
    return out


def _write(out: Path, made: RandomCheckpoint) -> None:
    entries: list[ScaleEntry] = []
    modules = [name.removesuffix(".weight") for name in made.names() if name.endswith(".weight")]
    others = [m for m in modules if is_projection(m) and m not in made.layers]
    options = {"layers": made.layers, "ignore": others, "shard_bytes": SHARD_BYTES}
    with CheckpointWriter(out, config=made.config, scheme=made.scheme, **options) as writer:
        for name in made.names():
            module = name.removesuffix(".weight")
            if module in made.layers:
                entries += _add_linear(writer, made, module)
            else:
                writer.add(name, made.tensor(name))
        entries += _add_cache(writer, made)
        documents = _tokenizer(int(made.config["vocab_size"]))
        writer.finish(ScaleTable(entries=tuple(entries)), documents)


def _add_linear(
    writer: CheckpointWriter, made: RandomCheckpoint, module: str
) -> Iterator[ScaleEntry]:
    """Add a layer; gives the rows of its scales."""
    scheme, stored = made.layers[module], made.weights([module])
    weights, inputs = scheme.weights, scheme.activations
    assert weights is not None
    input_scale = made.scale(f"{module}.input_scale") if scheme.static_input else None
    writer.add_linear(module, stored, torch.bfloat16, input_scale=input_scale)
    shown = scale_in_table(weights, stored)
    absmax = made.tensor(f"{module}.weight").abs().max().item()
    yield _entry(f"{module}.weight_scale", "weight", shown, weights, absmax)
    if inputs is not None and input_scale is not None:
        yield _entry(f"{module}.input_scale", "input", input_scale, inputs, ABSMAX)


def _add_cache(writer: CheckpointWriter, made: RandomCheckpoint) -> Iterator[ScaleEntry]:
    """Set the cache's scales; gives their rows."""
    spec = made.scheme.kv_cache
    for attention, offset in made.kv_offsets.items():
        writer.set_beside({f"{attention}.k_offset": offset})
    for attention, scales in made.kv_scales.items():
        assert spec is not None
        writer.set_kv_scales(attention, *scales)
        for role, scale in zip(ROLES, scales, strict=True):
            yield _entry(f"{attention}.{role[0]}_scale", role, scale, spec, ABSMAX)


def _entry(tensor: str, role: Role, scale: Tensor, spec: Any, absmax: float) -> ScaleEntry:
    statistic = "absmax" if role == "weight" else "constant"
    return unmeasured_entry(tensor, role, scale, spec.dtype, spec.granularity, absmax, statistic)


def _tokenizer(vocabulary: int) -> dict[str, bytes]:
    """The files of a tokenizer of so many words, by name."""
    settings = {"tokenizer_class": PreTrainedTokenizerFast.__name__, "unk_token": "t0"}
    return {
        "tokenizer.json": words_of(vocabulary).to_str().encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
