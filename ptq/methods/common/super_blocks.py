"""Scales and minima of Q4_K weights: those that 8 groups of 32 share two fp16 units for.

    w = d s q - e m,    q from 0 to 15, s from 1 to 63, m from 0 to 63        (ggml-common.h)

with d and e of 256 inputs, s and m of 32. A search takes, for each group by itself, shares of its
smallest and of its largest weight, and keeps the pair of least error; d and e follow from the
largest scale and minimum of a super-block; then the multiples about each scale and minimum are
tried, both at once. Elsewhere such weights are (q - 8 - z) d s with the float zero point
z = e m / (d s) - 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from formats.gguf.blocks import MOST, fp32_rounding, six_bits
from formats.scheme import SUPER_BLOCK
from kernels.numerics import divide

SIZE = 32
GROUPS = SUPER_BLOCK // SIZE
STEPS = 15  # from the smallest weight of a group to its largest
MIDDLE = 8  # of q, which is stored as int4 from -8 to 7
SHARES = (1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625, 0.5)
LEAST_UNIT = 2.0**-24  # of fp16, above zero
OFFSETS = (0, -1, 1, -2, 2, -3, 3)
Pair = tuple[Tensor, Tensor]
Errors = Callable[[Tensor, Tensor], Tensor]
Storable = Callable[[Tensor, int], Tensor]


def choose(weight: Tensor, errors: Errors | None) -> Pair:
    """Scales and zero points of a weight.

    Args:
        weight: [out, in], in super-blocks.
        errors: Of each group [out, groups], for scales and zero points of that shape; None to take
            the whole range of each group.

    Returns:
        fp32 [out, groups] each.

    Raises:
        ValueError: the weight holds NaN or infinity, or does not end with a super-block.
    """
    rows, columns = weight.shape
    if columns % SUPER_BLOCK or not bool(weight.isfinite().all()):
        raise ValueError(
            f"found a weight of {columns} inputs, or NaN or infinity in it; super-blocks have "
            f"{SUPER_BLOCK} inputs and finite weights"
        )
    groups = weight.float().view(rows, -1, SIZE)
    low, high = (-groups.amin(-1)).clamp(min=0), groups.amax(-1).clamp(min=0)
    wanted = _best(_in_range(low, high), errors)
    return with_zeros(*_best(_on_grid(*wanted), errors))


def with_zeros(scale: Tensor, minimum: Tensor) -> Pair:
    """Scales, and the zero points that minima are stored as."""
    return scale, (minimum.double() / scale.double() - MIDDLE).float()


def minima(scale: Tensor, zeros: Tensor) -> Tensor:
    """The inverse, but for the rounding of fp32."""
    return scale * (zeros + MIDDLE)


def units(scale: Tensor, zeros: Tensor) -> Pair:
    """d and e of each group, fp32 [out, groups], found from scales and zero points."""
    low = minima(scale, zeros)
    rounding = fp32_rounding(scale, zeros)
    scale, low, rounding = (x.unflatten(1, (-1, GROUPS)) for x in (scale, low, rounding))
    d, e = six_bits(scale)[0], six_bits(low, rounding)[0]
    return d.expand_as(scale).flatten(1), e.expand_as(scale).flatten(1)


def multiples(unit: Tensor, least: int) -> Storable:
    """What rounds values [blocks, N] of a group to multiples of units [blocks, groups, N]."""
    return lambda values, group: _nearest(values, unit[:, group], least)


def _best(candidates: Iterable[Pair], errors: Errors | None) -> Pair:
    """Of scales and minima those of least error, for each group; the first without errors."""
    given = iter(candidates)
    scale, low = next(given)
    if errors is None:
        return scale, low
    least = errors(*with_zeros(scale, low))
    for other, below in given:
        found = errors(*with_zeros(other, below))
        better = found < least
        least = torch.where(better, found, least)
        scale, low = torch.where(better, other, scale), torch.where(better, below, low)
    return scale, low


def _in_range(low: Tensor, high: Tensor) -> Iterator[Pair]:
    """Scales and minima for shares of what is below and above zero."""
    for below in SHARES:
        for above in SHARES:
            minimum = low * below
            yield ((high * above + minimum) / STEPS).clamp(min=LEAST_UNIT), minimum


def _on_grid(scale: Tensor, minimum: Tensor) -> Iterator[Pair]:
    """Multiples of six bits about scales and minima, the nearest first."""
    scale, minimum = (x.unflatten(1, (-1, GROUPS)) for x in (scale, minimum))
    d, e = _unit(scale, least=LEAST_UNIT), _unit(minimum)
    for step in OFFSETS:
        for move in OFFSETS:
            s, m = _nearest(scale + step * d, d, 1), _nearest(minimum + move * e, e, 0)
            yield s.flatten(1), m.flatten(1)


def _unit(values: Tensor, least: float = 0.0) -> Tensor:
    """The fp16 value next to a 63rd of the largest of values [..., 8], from `least` on [..., 1]."""
    unit = divide(values.amax(dim=-1, keepdim=True), MOST).half().float()
    return unit.clamp(min=least, max=torch.finfo(torch.float16).max)


def _nearest(values: Tensor, unit: Tensor, least: int) -> Tensor:
    """The multiples of a unit, `least` to 63 times, that are next to values; 0 where it is 0."""
    multiple = torch.round(values / torch.where(unit == 0, 1, unit))
    return multiple.clamp(least, MOST) * unit
