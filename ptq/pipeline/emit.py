"""From a solved block to the checkpoint: its tensors, and its scales with their origin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from calibrate.observers import choose_absmax, clip_fraction
from calibrate.spec import SINK_INPUT, ObserverSpec
from calibrate.tensor_statistics import TensorStatistics
from formats.adapters.factors import read_factors
from formats.cache_scheme import CacheRole, KVCacheSpec
from formats.checkpoint.kv_scales import LEAF
from formats.checkpoint.write import CheckpointWriter
from formats.families.family import LatentAttention
from formats.pack import least_unit
from formats.scale_table import ScaleEntry
from formats.stored.folder import INPUT_DIVISOR, OUTPUT_DIVISOR
from formats.stored.weights import StoredWeight, scale_in_table, weight_tensors
from kernels.numerics import TYPES, choose_scale, expand_scale
from kernels.two_level import two_level
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.cache import key_mean, query_moments
from ptq.methods.common.float_model import FloatModel, stored_tensors
from ptq.methods.common.positions import Positions
from ptq.pipeline.measure import CACHES, cache_ratios
from ptq.result import ModuleRow

LEAVES = {"input": INPUT_DIVISOR, "output": OUTPUT_DIVISOR}


def emit_rest(
    writer: CheckpointWriter,
    checkpoint: FloatModel,
    blocks: tuple[str, ...],
    without: Collection[str] = (),
) -> None:
    """Copy all tensors that belong to no decoder block, bit for bit, but for those in `without`."""
    of_blocks = tuple(f"{block}." for block in blocks)
    for name in checkpoint.names():
        if name not in without and not name.startswith(of_blocks):
            writer.add(name, checkpoint.tensor(name))


def block_tensors(
    checkpoint: FloatModel, work: BlockWork, layers: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """A block's quantized layers and folded vectors as stored; all else bit for bit as it was.

    Args:
        checkpoint: The float model.
        work: The block.
        layers: What `layer_tensors` gave for all that is quantized.
    """
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        if not name.startswith(f"{work.block.name}."):
            continue
        if module not in work.quantized:
            folded = work.folded.get(name)
            tensors |= stored_tensors(checkpoint, name) if folded is None else {name: folded}
        elif leaf == "weight":
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in layers[module].items()}
    return tensors


def layer_tensors(checkpoint: FloatModel, work: BlockWork) -> dict[str, dict[str, Tensor]]:
    """What is stored of each quantized layer, by its full name, in the host's memory."""
    found: dict[str, dict[str, Tensor]] = {}
    for module, solved in work.quantized.items():
        bias = work.block.linears[module].bias
        channels = solved.spec.two_level and not solved.spec.super_blocks
        assert not channels or two_level(solved.weight.scale) is not None
        dtype = checkpoint.dtype(f"{module}.weight")
        stored = weight_tensors(work.scheme_of(module), with_unit(work, module), dtype)
        if bias is not None:
            stored["bias"] = bias.to(checkpoint.dtype(f"{module}.bias"))
        if solved.input_scale is not None:
            stored["input_scale"] = solved.input_scale
        found[module] = {kind: tensor.cpu() for kind, tensor in stored.items()}
    return found


def linear_entries(work: BlockWork, rows: list[ModuleRow]) -> list[ScaleEntry]:
    """The scale table's rows of a block's quantized layers."""
    entries: list[ScaleEntry] = []
    for row in rows:
        solved = work.quantized[row.module]
        weight = work.block.linears[row.module].weight
        entries.append(
            ScaleEntry.of(
                f"{row.module}.weight_scale",
                "weight",
                scale_in_table(solved.spec, with_unit(work, row.module)),
                dtype=solved.spec.dtype,
                granularity=solved.spec.granularity,
                statistic=solved.statistic,
                absmax=weight.abs().max().item(),
                clip_fraction=weight_clip_fraction(weight, solved),
                sqnr_db=row.weight_sqnr_db,
            )
        )
        activations = work.scheme_of(row.module).activations
        if solved.input_scale is not None and activations is not None:
            stats = work.observed(row.module, "input")
            entries.append(
                ScaleEntry.of(
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


def sink_tensors(work: BlockWork) -> tuple[dict[str, Tensor], list[ScaleEntry]]:
    """Static input scales of sink tokens, by full name, and their rows of the scale table."""
    tensors, entries = dict[str, Tensor](), list[ScaleEntry]()
    for name in work.quantized:
        scale, spec = work.input_scale(name, SINK_INPUT), work.scheme_of(name).activations
        if scale is None or spec is None:
            continue
        stats, tensor = work.observed(name, SINK_INPUT), f"{name}.{LEAF}"
        tensors[tensor] = scale
        entry = ScaleEntry.of(
            tensor,
            SINK_INPUT,
            scale,
            dtype=spec.dtype,
            granularity="per_tensor",
            statistic="absmax",
            absmax=stats.absmax,
            tokens=stats.tokens,
        )
        entries.append(entry)
    return tensors, entries


def adapter_factors(checkpoint: FloatModel, work: BlockWork) -> dict[str, Tensor]:
    """What a block's layers were divided by, fp32 on the host, where it is not all 1.

    That is what `formats.adapters.factors` stores, with what the model itself had been divided by.
    Experts, which no adapter runs on, are left out.
    """
    before, found = read_factors(checkpoint.path), dict[str, Tensor]()
    for name, linear in work.block.linears.items():
        if work.block.expert_of(name):
            continue
        outputs, inputs = linear.weight.shape
        known = before.divisors(name, (outputs, inputs))
        for role, divisor in zip(("input", "output"), known, strict=True):
            now = work.rescaled.get((name, role))
            factor = divisor if now is None else divisor * now.cpu().double()
            if bool((factor != 1).any()):
                found[f"{name}.{LEAVES[role]}"] = factor.float()
    return found


def _range_by(work: BlockWork, name: str) -> str:
    """How the range of a layer's input was found."""
    factor = work.clips.get(name, 1.0)
    method = work.settings.input_observer.method
    return method if factor == 1.0 else f"{method} x {factor:g}, searched"


def cache_tensors(
    work: BlockWork, observer: ObserverSpec
) -> tuple[dict[str, Tensor], list[ScaleEntry]]:
    """What is stored of a block's cache, by full name, and its rows of the scale table."""
    spec = work.scheme.kv_cache
    if spec is None:
        return {}, []
    tensors, entries = ({}, []) if spec.dynamic else _kv_scales(work, spec, observer)
    if spec.center_keys:
        tensors[f"{work.block.attention}.k_offset"] = key_mean(work).float()
    if spec.compensate_keys:
        tensors[f"{work.block.attention}.q_moments"] = query_moments(work).float()
    return tensors, entries


def _kv_scales(
    work: BlockWork, spec: KVCacheSpec, observer: ObserverSpec
) -> tuple[dict[str, Tensor], list[ScaleEntry]]:
    """The static scales of a block's cached K and V, and their rows of the scale table."""
    attention, entries = work.block.attended, []
    family = work.block.family
    latent = family is not None and isinstance(family.attention, LatentAttention)
    by_channel = {role: spec.by_channel(role, latent=latent) for role in CACHES}
    means = {"k_cache": key_mean(work)} if spec.center_keys else {}
    found: dict[CacheRole, tuple[Tensor, float]] = {
        role: kv_scale(
            work.observed(attention, role),
            spec,
            role,
            observer,
            by_channel=by_channel[role],
            mean=means.get(role),
            positions=work.settings.positions,
        )
        for role in CACHES
    }
    ratios = cache_ratios(work, {role: scale for role, (scale, _) in found.items()})
    for role, (scale, clipped) in found.items():
        stats = work.observed(attention, role)
        by_head = "per_tensor" if spec.granularity == "per_tensor" else "per_head"
        granularity = "per_channel" if by_channel[role] else by_head
        entries.append(
            ScaleEntry.of(
                f"{attention}.{role[0]}_scale",
                role,
                scale,
                dtype=spec.dtype_of(role),
                granularity=granularity,
                statistic=observer.method,
                absmax=stats.absmax,
                tokens=stats.tokens,
                clip_fraction=clipped,
                sqnr_db=ratios[role],
            )
        )
    return {f"{attention}.{role[0]}_scale": scale for role, (scale, _) in found.items()}, entries


def kv_scale(
    stats: TensorStatistics,
    spec: KVCacheSpec,
    role: CacheRole,
    observer: ObserverSpec,
    *,
    by_channel: bool,
    mean: Tensor | None,
    positions: Positions | None,
) -> tuple[Tensor, float]:
    """Static scale of K or V, and the share of values that it cuts off.

    Channels are scaled by their absmax, whatever the observer: a channel has no histogram. fp8
    keys less their `mean` [kv heads, D] are bounded by both, as they are and centred, at all
    `positions`, which costs a float at most a bit of its exponent.
    """
    kind = TYPES[spec.dtype_of(role)]
    if mean is not None:
        reach = stats.channel_absmax if positions is None else positions.reach(stats.channel_absmax)
        bound = reach + mean.abs().float()
        if spec.granularity == "per_tensor":
            bound = bound.reshape(1, -1)
        return choose_scale(bound if by_channel else bound.amax(1), kind), 0.0
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


def with_unit(work: BlockWork, name: str) -> StoredWeight:
    """A solved weight; NVFP4's scales have the unit that all layers have that run as one with it.

    A runtime that multiplies by such layers at once has one global scale for them.
    """
    solved = work.quantized[name]
    if solved.spec.scale_type != "e4m3":
        return solved.weight
    scales = (work.quantized[other].weight.scale.max() for other in work.merged_with(name))
    unit = least_unit(torch.stack(list(scales)))
    return replace(solved.weight, unit=unit.expand(len(solved.weight.q), 1))


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
