"""Scales of weights, searched or not, and rounding to the nearest.

A block of a weight (a channel, a group, ...) is rounded with a scale; the largest magnitude gives
one that cuts nothing, a smaller scale cuts the largest values and renders the others finer.
Searches try a grid of factors of the first and keep, for each block, the one of least error:

    mse           sum_k e_k^2                      e = W - Q(W)
    weighted_mse  sum_k E[x_k^2] e_k^2             the inputs' second moments as importance
    output_mse    sum_kl e_k E[x_k x_l] e_l        k, l of one group: AWQ's clipping (Lin et al.
                                                   2023, section 3.2), the error of its output

all in fp32, with the earlier candidate of equals.

Scales of two levels, s = unit m with an integer m from 1 to 16 for each group of a channel, are
rounded to the nearest multiple of the least unit that reaches the largest of a channel. A search
finds scales without levels first; of a few such units, and of the multiples about each scale, it
takes those of least error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from formats.scheme import WeightSpec
from formats.stored.weights import StoredWeight
from kernels.numerics import (
    TYPES,
    QuantizedType,
    block_absmax,
    block_view,
    choose_affine,
    choose_scale,
    dequantize,
    expand_scale,
    pad_to_blocks,
    quantize,
)
from kernels.two_level import LARGEST, choose_unit, larger_unit, nearest_multiples
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.spec import MOMENTS, ScaleSearch

FACTORS = tuple(1.0 - 0.02 * i for i in range(30))  # of the scale that cuts nothing
UNITS = 4  # tried for a channel, each about a tenth larger than the one before


def round_to_nearest(work: BlockWork, search: ScaleSearch = "absmax") -> dict[str, QuantizedLinear]:
    """Quantize the block's target layers as they are now, by full name."""
    solved = {}
    for name in work.targets:
        weight = work.block.linears[name].weight
        inputs = work.second_moments(name) if MOMENTS[search] != "none" else None
        spec, dtype = work.weight_spec(name), work.scale_dtype(name)
        stored = round_weight(weight, spec, dtype, search, inputs)
        solved[name] = QuantizedLinear(stored, spec, work.input_scale(name), search)
    return solved


def round_weight(
    weight: Tensor,
    spec: WeightSpec,
    dtype: torch.dtype,
    search: ScaleSearch = "absmax",
    moments: Tensor | None = None,
) -> StoredWeight:
    """Round a weight to the nearest, with scales by absmax or the best of a search.

    Args:
        weight: [out, in], float.
        spec: How it is stored.
        dtype: Type in which the scales are stored.
        search: How scales are chosen; see the module's docstring.
        moments: E[x x^T] of the inputs [in, in] for `output_mse`, its diagonal [in] or itself for
            `weighted_mse`.
    """
    scale, zero_point = choose_qparams(weight, spec, dtype, search, moments)
    q = quantize(weight, scale, TYPES[spec.dtype], zero_point, spec.block)
    return StoredWeight(q, scale, zero_point)


def choose_qparams(
    weight: Tensor,
    spec: WeightSpec,
    dtype: torch.dtype,
    search: ScaleSearch = "absmax",
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block of a weight; arguments as of `round_weight`."""
    if spec.two_level:
        return _two_levels(weight, spec, dtype, search, moments), None
    low, high = _ranges(weight, spec)
    best, zero_point = _qparams(low, high, spec, dtype, 1.0)
    if search == "absmax":
        return best, zero_point
    least = _errors(weight, best, zero_point, spec, search, moments)
    for factor in FACTORS[1:]:
        scale, zeros = _qparams(low, high, spec, dtype, factor)
        errors = _errors(weight, scale, zeros, spec, search, moments)
        better = errors < least
        least = torch.where(better, errors, least)
        best = torch.where(better, scale, best)
        if zeros is not None and zero_point is not None:
            zero_point = torch.where(better, zeros, zero_point)
    return best, zero_point


def _ranges(weight: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each block; both the largest magnitude if it is symmetric."""
    if spec.symmetric:
        absmax = block_absmax(weight, spec.block)
        return absmax, absmax
    blocks = block_view(weight.float(), spec.block)
    return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))


def _qparams(
    low: Tensor, high: Tensor, spec: WeightSpec, dtype: torch.dtype, factor: float
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point for the range of each block times `factor`."""
    kind = TYPES[spec.dtype]
    if spec.symmetric:
        return storable(choose_scale(high * factor, kind), dtype), None
    low, high = low * factor, high * factor
    scale, _ = choose_affine(low, high, kind)
    scale = storable(scale, dtype)
    zero_point = (kind.q_min - torch.round(low.clamp(max=0) / scale)).clamp(kind.q_min, kind.q_max)
    return scale, zero_point.to(kind.storage)


def _two_levels(
    weight: Tensor,
    spec: WeightSpec,
    dtype: torch.dtype,
    search: ScaleSearch,
    moments: Tensor | None,
) -> Tensor:
    """Scales [out, groups] of two levels; arguments as of `round_weight`."""
    plain = spec.model_copy(update={"two_level": False})
    wanted, _ = choose_qparams(weight, plain, dtype, search, moments)
    unit = choose_unit(wanted)
    best = nearest_multiples(wanted, unit) * unit
    if search == "absmax":
        return best
    least = torch.full_like(unit, torch.inf)
    for _ in range(UNITS):
        scale, errors = _best_multiples(
            wanted, unit, lambda s: _errors(weight, s, None, spec, search, moments)
        )
        total = errors.sum(dim=1, keepdim=True)
        better = total < least
        least = torch.where(better, total, least)
        best = torch.where(better, scale, best)
        unit = larger_unit(unit)
    return best


def _best_multiples(
    wanted: Tensor, unit: Tensor, errors_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Of a unit's multiples about wanted scales [out, groups], those of least error, and theirs."""
    nearest = nearest_multiples(wanted, unit)
    best, least = nearest * unit, torch.full_like(wanted, torch.inf)
    for offset in (0, -1, 1):
        scale = (nearest + offset).clamp(1, LARGEST) * unit
        errors = errors_of(scale)
        better = errors < least
        least = torch.where(better, errors, least)
        best = torch.where(better, scale, best)
    return best, least


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as the checkpoint holds them: rounded to `dtype`, still positive, in fp32."""
    if dtype == torch.float16:
        scale = scale.clamp(min=torch.finfo(dtype).smallest_normal)
    return scale.to(dtype).float()


def _errors(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: WeightSpec,
    search: ScaleSearch,
    moments: Tensor | None,
) -> Tensor:
    """Error of each block, of the shape of the scales."""
    error = _rounding_error(weight, scale, zero_point, spec)
    if search == "output_mse":
        assert moments is not None
        return _output_errors(error, spec.block, moments)
    squared = error.square()
    if search == "weighted_mse":
        assert moments is not None
        squared = squared * (moments if moments.dim() == 1 else moments.diagonal())
    return block_view(pad_to_blocks(squared, spec.block), spec.block).sum(dim=(1, 3))


def _rounding_error(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, spec: WeightSpec
) -> Tensor:
    """W - Q(W) [out, in]; integers as `quantize` finds them, without a turn through their type."""
    kind = TYPES[spec.dtype]
    if kind.storage.is_floating_point or zero_point is not None:
        q = quantize(weight, scale, kind, zero_point, spec.block)
        return weight - dequantize(q, scale, zero_point, spec.block)
    scales = expanded(scale, weight, spec)
    q = (weight.float() / scales).round_().clamp_(kind.q_min, kind.q_max)
    return q.mul_(scales).sub_(weight).neg_()


def _output_errors(error: Tensor, block: tuple[int, int], moments: Tensor) -> Tensor:
    """e H e^T within each block's inputs, summed over its outputs: of the shape of the scales."""
    columns = error.shape[1]
    size = columns if block[1] == -1 else block[1]
    parts = []
    for start in range(0, columns, size):
        span = slice(start, start + size)
        part = error[:, span]
        parts.append((part @ moments[span, span]).mul_(part).sum(dim=1))
    rows = (block[0], 1)
    by_row = torch.stack(parts, dim=1)  # [out, blocks]
    return block_view(pad_to_blocks(by_row, rows), rows).sum(dim=(1, 3))


def expanded(scale: Tensor, weight: Tensor, spec: WeightSpec) -> Tensor:
    """One scale for each element of a weight [out, in]."""
    return expand_scale(scale, weight.shape, spec.block).expand(weight.shape)


def round_column(
    column: Tensor, scale: Tensor, kind: QuantizedType, zeros: Tensor | None
) -> Tensor:
    """Values of the type, in fp32, next to those of a column [N] with a scale for each."""
    q = column / scale
    if kind.storage.is_floating_point:
        return q.clamp_(kind.q_min, kind.q_max).to(kind.storage).float()
    q = q.round_() if zeros is None else q.round_().add_(zeros)
    return q.clamp_(kind.q_min, kind.q_max)
