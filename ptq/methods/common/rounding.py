"""Scales of weights, searched or not, and rounding to the nearest.

A block of a weight (a channel, a group, ...) is rounded with a scale; the largest magnitude gives
one that cuts nothing, a smaller scale cuts the largest values and renders the others finer.
Searches try a grid of factors of the first and keep, for each block, the one of least error:

    mse           sum_k e_k^2                      e = W - Q(W)
    weighted_mse  sum_k E[x_k^2] e_k^2             the inputs' second moments as importance
    output_mse    sum_kl e_k E[x_k x_l] e_l        k, l of one group: AWQ's clipping (Lin et al.
                                                   2023, section 3.2), the error of its output

all in fp32, with the earlier candidate of equals. The last is a product with all of H where a
block is a channel: on a CPU one that has cut so much that its error is `FAR` from its least is not
tried with smaller factors. Scales of few values, the powers of two of MXFP4
and MXFP8 and the e4m3 multiples of NVFP4, are not tried by factors: the next larger and smaller
values are, for e2m1 up to where the largest magnitude becomes 4 in place of 6 and leaves the wide
step between these unused.

Scales of two levels, s = unit m with an integer m from 1 to 16 for each group of a channel, are
rounded to the nearest multiple of the least unit that reaches the largest of a channel. A search
finds scales without levels first; of a few such units, and of the multiples about each scale, it
takes those of least error. Those of Q4_K, which have minima too: `ptq.methods.common.super_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from formats.namespace import later
from formats.scheme import WeightSpec
from formats.stored.weights import StoredWeight
from kernels.numerics import (
    TINY_SCALE,
    TYPES,
    E4M3Multiples,
    ScaleStorage,
    block_absmax,
    block_view,
    choose_affine,
    choose_power,
    choose_scale,
    dequantize,
    e4m3_multiples,
    e4m3_unit,
    expand_scale,
    pad_to_blocks,
    quantize,
    round_to,
)
from kernels.two_level import LARGEST, choose_unit, larger_unit, nearest_multiples
from ptq.methods.common import super_blocks
from ptq.methods.common.block import BlockWork, QuantizedLinear
from ptq.methods.common.spec import MOMENTS, ScaleSearch

with later():
    from kernels.triton.calibration import group_errors as kernels  # where there is a GPU

E4M3_STEPS = (1, 2, 3, 4, 5, 6, -1, -2, -3)  # from the scale that cuts nothing, an eighth or less
LAST_E4M3 = 0x7E  # bits of 448
POWERS = (1.0, 2.0, 0.5)
FACTORS = tuple(1.0 - 0.02 * i for i in range(30))  # of the scale that cuts nothing
FAR = 5.0  # times a row's least error; of 36,000 rows of two models none came back from there
LEAST_HALF = 2.0**-18  # 64 steps of fp16's smallest values
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
    dtype: ScaleStorage,
    search: ScaleSearch = "absmax",
    moments: Tensor | None = None,
) -> StoredWeight:
    """Round a weight to the nearest, with scales by absmax or the best of a search.

    Args:
        weight: [out, in], float.
        dtype: How the scales are stored.
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
    dtype: ScaleStorage,
    search: ScaleSearch = "absmax",
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block of a weight; arguments as of `round_weight`."""
    if spec.super_blocks:
        by_group = partial(_errors, weight, spec=spec, search=search, moments=moments)
        return super_blocks.choose(weight, None if search == "absmax" else by_group)
    if spec.two_level:
        return _two_levels(weight, spec, dtype, search, moments), None
    candidates = _candidates(weight, spec, dtype)
    best, zero_point = next(candidates)
    if search == "absmax":
        return best, zero_point
    least = _errors(weight, best, zero_point, spec, search, moments)
    slow = search == "output_mse" and spec.granularity == "per_channel" and not weight.is_cuda
    near = torch.ones(len(weight), dtype=torch.bool)  # rows that may find a better scale yet
    for scale, zeros in candidates:
        if slow:
            own = None if zeros is None else zeros[near]
            errors = torch.full_like(least, torch.inf)
            errors[near] = _errors(weight[near], scale[near], own, spec, search, moments)
            near = (errors <= FAR * least)[:, 0]
        else:
            errors = _errors(weight, scale, zeros, spec, search, moments)
        better = errors < least
        least = torch.where(better, errors, least)
        best = torch.where(better, scale, best)
        if zeros is not None and zero_point is not None:
            zero_point = torch.where(better, zeros, zero_point)
    return best, zero_point


def _candidates(
    weight: Tensor, spec: WeightSpec, dtype: ScaleStorage
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales and zero points that a search tries, the one by the largest magnitude first."""
    low, high = _ranges(weight, spec)
    if spec.scale_type == "float":
        assert isinstance(dtype, torch.dtype)
        yield from (_qparams(low, high, spec, dtype, factor) for factor in FACTORS)
        return
    if spec.scale_type == "e8m0":
        power = choose_power(high, TYPES[spec.dtype])
        yield from ((power * factor, None) for factor in POWERS)
        return
    scale = choose_scale(high, TYPES[spec.dtype])
    unit = e4m3_unit(scale.max())
    if isinstance(dtype, E4M3Multiples):
        unit = unit.clamp(min=dtype.unit)
    nearest = e4m3_multiples(scale, unit)
    yield nearest, None
    codes = (nearest / unit).to(torch.float8_e4m3fn).view(torch.int8)  # positive: in order
    for step in E4M3_STEPS:
        yield (codes + step).clamp_(1, LAST_E4M3).view(torch.float8_e4m3fn).float() * unit, None


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
    dtype: ScaleStorage,
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
    """Scales as the checkpoint holds them: rounded to `dtype`, in fp32.

    Those that fp16 would round by more than 1% stay as they are (`weight_tensors` stores the
    layer's in fp32 then), but for that of nothing but zeros, which may be any.
    """
    rounded = scale.to(dtype).float()
    if dtype != torch.float16:
        return rounded
    rounded = torch.where(scale < LEAST_HALF, scale, rounded)
    return rounded.masked_fill(scale <= TINY_SCALE, torch.finfo(dtype).smallest_normal)


def _errors(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    spec: WeightSpec,
    search: ScaleSearch,
    moments: Tensor | None,
) -> Tensor:
    """Error of each block, of the shape of the scales."""
    if search == "output_mse" and weight.is_cuda and _in_one_pass(weight, spec):
        assert moments is not None
        kind, rows = TYPES[spec.dtype], len(weight) if spec.block[0] == -1 else spec.block[0]
        by_row = kernels.group_errors(weight, scale, zero_point, moments, kind, rows)
        return _of_blocks(by_row, spec.block[0])
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
    if zero_point is not None:
        q = quantize(weight, scale, kind, zero_point, spec.block)
        return weight - dequantize(q, scale, zero_point, spec.block)
    scales = expanded(scale, weight, spec)
    return round_to(weight.float() / scales, kind).mul_(scales).sub_(weight).neg_()


def _output_errors(error: Tensor, block: tuple[int, int], moments: Tensor) -> Tensor:
    """e H e^T within each block's inputs, summed over its outputs: of the shape of the scales."""
    columns = error.shape[1]
    size = columns if block[1] == -1 else block[1]
    parts = []
    for start in range(0, columns, size):
        span = slice(start, start + size)
        part = error[:, span]
        parts.append((part @ moments[span, span]).mul_(part).sum(dim=1))
    return _of_blocks(torch.stack(parts, dim=1), block[0])


def _of_blocks(by_row: Tensor, rows: int) -> Tensor:
    """Sums of errors [out, blocks] over the rows of a block."""
    block = (rows, 1)
    return block_view(pad_to_blocks(by_row, block), block).sum(dim=(1, 3))


def _in_one_pass(weight: Tensor, spec: WeightSpec) -> bool:
    """Whether a GPU has a kernel for errors of a weight's blocks."""
    columns = weight.shape[1]
    size = columns if spec.block[1] == -1 else spec.block[1]
    return not spec.float_zeros and kernels.takes(TYPES[spec.dtype], size, columns)


def expanded(scale: Tensor, weight: Tensor, spec: WeightSpec) -> Tensor:
    """One scale for each element of a weight [out, in]."""
    return expand_scale(scale, weight.shape, spec.block).expand(weight.shape)
