"""From a solved block to the checkpoint: its tensors, and its scales with where they came from."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from calibrate.observers import choose_absmax, clip_fraction
from calibrate.spec import ObserverSpec
from calibrate.tensor_statistics import TensorStatistics
from formats.checkpoint.write import CheckpointWriter
from formats.families.attention import LatentAttention
from formats.scale_table import Role, ScaleEntry
from formats.scheme import KVCacheSpec
from formats.stored.weights import weight_tensors
from kernels.numerics import TYPES, choose_scale, expand_scale
from kernels.two_level import two_level
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.stored_layers import stored_tensors
from ptq.pipeline.measure import CACHES, cache_ratios
from ptq.result import ModuleRow


def emit_rest(writer: CheckpointWriter, checkpoint: FloatModel, blocks: tuple[str, ...]) -> None:
    """Copy every tensor that belongs to no decoder block, bit for bit.

    What lies behind the last block, as layers do that predict further tokens (DeepSeek-V3), is left
    out: nothing runs it, and it is not calibrated.
    """
    parents = {block.rpartition(".")[0] for block in blocks}
    numbered = re.compile("|".join(rf"{re.escape(parent)}\.\d+\." for parent in parents))
    for name in checkpoint.names():
        if not numbered.match(name):
            writer.add(name, checkpoint.tensor(name))


def block_tensors(checkpoint: FloatModel, work: BlockWork) -> dict[str, Tensor]:
    """A block's quantized layers and folded vectors as stored; all else bit for bit as it was."""
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if not name.startswith(f"{work.block.name}."):
            continue
        if module not in work.quantized:
            folded = work.folded.get(name)
            tensors |= stored_tensors(checkpoint, name) if folded is None else {name: folded}
        elif leaf == "weight":
            solved, bias = work.quantized[module], work.block.linears[module].bias
            assert not solved.spec.two_level or two_level(solved.weight.scale) is not None
            stored = weight_tensors(work.scheme_of(module), solved.weight, checkpoint.dtype(name))
            if bias is not None:
                stored["bias"] = bias.to(checkpoint.dtype(f"{module}.bias"))
            if solved.input_scale is not None:
                stored["input_scale"] = solved.input_scale
            tensors |= {f"{module}.{kind}": tensor.cpu() for kind, tensor in stored.items()}
    return tensors


def linear_entries(work: BlockWork, rows: list[ModuleRow]) -> list[ScaleEntry]:
    """The scale table's rows of a block's quantized layers."""
    entries: list[ScaleEntry] = []
    for row in rows:
        solved = work.quantized[row.module]
        weight = work.block.linears[row.module].weight
        entries.append(
            _entry(
                f"{row.module}.weight_scale",
                "weight",
                stored_scale(solved),
                dtype=solved.spec.dtype,
                granularity=solved.spec.granularity,
                statistic=solved.statistic,
                absmax=weight.abs().max().item(),
                tokens=0,
                clip_fraction=weight_clip_fraction(weight, solved),
                sqnr_db=row.weight_sqnr_db,
            )
        )
        activations = work.scheme_of(row.module).activations
        if solved.input_scale is not None and activations is not None:
            stats = work.observed(row.module, "input")
            entries.append(
                _entry(
                    f"{row.module}.input_scale",
                    "input",
                    solved.input_scale,
                    dtype=activations.dtype,
                    granularity="per_tensor",
                    statistic=_range_by(work, row.module),
                    absmax=stats.absmax,
                    tokens=stats.tokens,
                    clip_fraction=clip_fraction(stats, work.input_absmax(row.module)),
                    sqnr_db=row.input_sqnr_db,
                )
            )
    return entries


def _range_by(work: BlockWork, name: str) -> str:
    """How the range of a layer's input was found."""
    factor = work.clips.get(name, 1.0)
    method = work.input_observer.method
    return method if factor == 1.0 else f"{method} x {factor:g}, searched"


def kv_scales(
    work: BlockWork, spec: KVCacheSpec, observer: ObserverSpec
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[ScaleEntry]]:
    """The static scales of a block's cached K and V, and their rows of the scale table."""
    if spec.dynamic:
        return {}, []
    attention, entries = work.block.attention, []
    family = work.block.family
    latent = family is not None and isinstance(family.attention, LatentAttention)
    by_channel = {role: spec.by_channel(role, latent=latent) for role in CACHES}
    found: dict[Role, tuple[Tensor, float]] = {
        role: kv_scale(work.observed(attention, role), spec, observer, by_channel=by_channel[role])
        for role in CACHES
    }
    ratios = cache_ratios(work, {role: scale for role, (scale, _) in found.items()})
    for role, (scale, clipped) in found.items():
        stats = work.observed(attention, role)
        by_head = "per_tensor" if spec.granularity == "per_tensor" else "per_head"
        granularity = "per_channel" if by_channel[role] else by_head
        entries.append(
            _entry(
                f"{attention}.{role[0]}_scale",
                role,
                scale,
                dtype=spec.dtype,
                granularity=granularity,
                statistic=observer.method,
                absmax=stats.absmax,
                tokens=stats.tokens,
                clip_fraction=clipped,
                sqnr_db=ratios[role],
            )
        )
    return {attention: (found["k_cache"][0], found["v_cache"][0])}, entries


def kv_scale(
    stats: TensorStatistics, spec: KVCacheSpec, observer: ObserverSpec, *, by_channel: bool
) -> tuple[Tensor, float]:
    """Static scale of K or V, and the share of values that it cuts off.

    Channels are scaled by their absmax, whatever the observer: a channel has no histogram.
    """
    kind = TYPES[spec.dtype]
    if by_channel:
        absmax = stats.channel_absmax.reshape(stats.heads, -1)
        return choose_scale(absmax, kind), 0.0
    parts = [stats]
    if spec.granularity != "per_tensor":
        parts = [stats.head(h) for h in range(stats.heads)] if stats.heads > 1 else parts
    ranges = [choose_absmax(part, observer, kind) for part in parts]
    scale = choose_scale(torch.tensor(ranges, dtype=torch.float32), kind)
    clipped = [clip_fraction(part, limit) for part, limit in zip(parts, ranges, strict=True)]
    return scale, sum(clipped) / len(clipped)  # heads have equal counts


def stored_scale(solved: QuantizedLinear) -> Tensor:
    """A weight's scales in the shape that the checkpoint has."""
    scale = solved.weight.scale
    return scale.reshape(1) if solved.spec.granularity == "per_tensor" else scale


def weight_clip_fraction(weight: Tensor, solved: QuantizedLinear) -> float:
    """Share of the weights that lie beyond the range of their scale by more than half a step."""
    kind, stored = TYPES[solved.spec.dtype], solved.weight
    if kind.storage.is_floating_point:
        return 0.0
    scale = expand_scale(stored.scale, weight.shape, solved.spec.block)
    steps = weight / scale
    if stored.zero_point is not None:
        steps = steps + expand_scale(stored.zero_point.float(), weight.shape, solved.spec.block)
    beyond = (steps > kind.q_max + 0.5) | (steps < kind.q_min - 0.5)
    return beyond.float().mean().item()


def _entry(
    tensor: str,
    role: Role,
    scale: Tensor,
    *,
    dtype: str,
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
        dtype=dtype,
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
