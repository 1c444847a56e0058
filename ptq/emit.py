"""From a solved block to the checkpoint: its tensors, and its scales with where they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.observers import (
    ObserverSpec,
    TensorStatistics,
    choose_absmax,
    clip_fraction,
    estimated_sqnr_db,
)
from formats.checkpoint import Checkpoint
from formats.scale_table import Role, ScaleEntry
from formats.scheme import KVCacheSpec
from formats.writer import CheckpointWriter
from kernels.numerics import choose_scale
from ptq.methods.base import BlockWork
from ptq.result import ModuleRow


def emit_rest(writer: CheckpointWriter, checkpoint: Checkpoint, blocks: tuple[str, ...]) -> None:
    """Copy every tensor that belongs to no decoder block, bit for bit."""
    prefixes = tuple(f"{block}." for block in blocks)
    for name in checkpoint.names():
        if not name.startswith(prefixes):
            writer.add(name, checkpoint.tensor(name))


def emit_block(writer: CheckpointWriter, checkpoint: Checkpoint, work: BlockWork) -> None:
    """Write a block: its quantized layers and folded vectors; all else is copied bit for bit."""
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if not name.startswith(f"{work.block.name}."):
            continue
        if module not in work.quantized:
            tensor = work.folded.get(name)
            writer.add(name, checkpoint.tensor(name) if tensor is None else tensor)
        elif leaf == "weight":
            solved, bias = work.quantized[module], work.block.linears[module].bias
            stored = None if bias is None else bias.to(checkpoint.dtype(f"{module}.bias"))
            writer.add_linear(module, solved.weight, solved.scale, stored, solved.input_scale)


def linear_entries(work: BlockWork, rows: list[ModuleRow]) -> list[ScaleEntry]:
    """The scale table's rows of a block's quantized layers."""
    entries: list[ScaleEntry] = []
    for row in rows:
        solved = work.quantized[row.module]
        entries.append(
            _entry(
                f"{row.module}.weight_scale",
                "weight",
                solved.scale,
                granularity="per_channel",
                statistic="absmax",
                absmax=work.block.linears[row.module].weight.abs().max().item(),
                tokens=0,
                clip_fraction=0.0,
                sqnr_db=row.weight_sqnr_db,
            )
        )
        if solved.input_scale is not None:
            stats = work.observed(row.module, "input")
            entries.append(
                _entry(
                    f"{row.module}.input_scale",
                    "input",
                    solved.input_scale,
                    granularity="per_tensor",
                    statistic=work.input_observer.method,
                    absmax=stats.absmax,
                    tokens=stats.tokens,
                    clip_fraction=clip_fraction(stats, work.input_absmax(row.module)),
                    sqnr_db=estimated_sqnr_db(stats, solved.input_scale.item()),
                )
            )
    return entries


def emit_kv_scales(
    writer: CheckpointWriter, work: BlockWork, spec: KVCacheSpec, observer: ObserverSpec
) -> list[ScaleEntry]:
    """Set the static scales of a block's cached K and V; returns their rows of the scale table."""
    attention, scales, entries = work.block.attention, [], []
    roles: tuple[Role, Role] = ("k_cache", "v_cache")
    for role in roles:
        stats = work.observed(attention, role)
        per_head = spec.granularity == "per_head"
        parts = [stats.head(h) for h in range(stats.heads)] if per_head else [stats]
        ranges = [choose_absmax(part, observer) for part in parts]
        scale = choose_scale(torch.tensor(ranges, dtype=torch.float32))
        scales.append(scale)
        clipped = [clip_fraction(part, limit) for part, limit in zip(parts, ranges, strict=True)]
        entries.append(
            _entry(
                f"{attention}.{role[0]}_scale",
                role,
                scale,
                granularity=spec.granularity,
                statistic=observer.method,
                absmax=stats.absmax,
                tokens=stats.tokens,
                clip_fraction=sum(clipped) / len(clipped),  # heads have equal counts
                sqnr_db=_worst_sqnr_db(parts, scale),
            )
        )
    writer.set_kv_scales(attention, *scales)
    return entries


def _worst_sqnr_db(parts: list[TensorStatistics], scale: Tensor) -> float | None:
    """The lowest ratio of all heads; None if every one is lossless."""
    ratios = [estimated_sqnr_db(p, s.item()) for p, s in zip(parts, scale, strict=True)]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _entry(
    tensor: str,
    role: Role,
    scale: Tensor,
    *,
    granularity: str,
    statistic: str,
    absmax: float,
    tokens: int,
    clip_fraction: float,
    sqnr_db: float | None,
) -> ScaleEntry:
    return ScaleEntry(
        module=tensor.rpartition(".")[0],
        role=role,
        dtype="int8",
        granularity=granularity,
        shape=tuple(scale.shape),
        tensor=tensor,
        scale_min=scale.min().item(),
        scale_max=scale.max().item(),
        statistic=statistic,
        absmax=absmax,
        tokens=tokens,
        clip_fraction=clip_fraction,
        sqnr_db=sqnr_db,
    )
