"""Two-level scales: a row's group scales as whole multiples of one unit.

Where the scales of a row are multiples of a unit, the integers of the whole row can be summed and
the sum scaled once (progressive group quantization: Lin et al. 2024, QServe):

    s[n, g] = unit[n] m[n, g],   1 <= m <= 16,
    y[t, n] = sx[t] unit[n] sum_k xq[t, k] (q[n, k] m[n, k / group]),

and q in [-8, 7] makes q m in [-128, 112] an int8. Such scales are stored as ordinary ones; that
they have two levels can be seen in the scales alone. A unit that is chosen here has 4 significant
bits, so that a scale has at most 8 and is exact in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import divide

BITS = 4  # of a chosen unit
LARGEST = 16  # of the multiples: -8 * 16 is the smallest int8
_ROWS = 4096  # looked at first: they settle it for most ordinary scales


def choose_unit(scale: Tensor) -> Tensor:
    """The least unit whose multiples reach a row's largest scale.

    Args:
        scale: [..., N, G] fp32, finite and positive.

    Returns:
        fp32 [..., N, 1], of 4 significant bits.
    """
    return _rounded_up(scale.amax(dim=-1, keepdim=True) / LARGEST)


def larger_unit(unit: Tensor) -> Tensor:
    """The next of 4 significant bits, by a fifteenth to an eighth larger."""
    return _rounded_up(unit * 1.01)


def nearest_multiples(scale: Tensor, unit: Tensor) -> Tensor:
    """fp32 whole numbers from 1 to 16: scales [N, G] in units [N, 1], rounded."""
    return torch.round(scale / unit).clamp(1, LARGEST)


def stored_unit(scale: Tensor) -> Tensor:
    """The least unit of 4 significant bits that scales of two levels are multiples of.

    Args:
        scale: [N, G] fp32, made of such a unit.

    Returns:
        fp32 [N, 1].
    """
    high = scale.amax(dim=1, keepdim=True)
    unit = high
    for multiple in range(1, LARGEST + 1):
        finer = divide(high, multiple)
        exact = (torch.round(scale / finer) * finer == scale).all(dim=1, keepdim=True)
        unit = torch.where(exact & (_rounded_up(finer) == finer), finer, unit)
    return unit


def _rounded_up(x: Tensor) -> Tensor:
    """The least number of 4 significant bits that is not below a positive one."""
    mantissa, _ = torch.frexp(x)  # from 1/2 to 1
    return torch.ceil(mantissa * 2**BITS) * (x / mantissa / 2**BITS)


def two_level(scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """The unit and the multiples of scales that have two levels.

    Args:
        scale: [N, G], bf16, fp16 or fp32: G group scales of each of N rows.

    Returns:
        (unit [N] fp32, m [N, G] int8) with unit[n] * m[n, g] == scale[n, g] exactly and m in
        [1, 16], each unit the largest that there is; None where a row has none: its scales are no
        such multiples, or one of them is not positive or not finite.

    Raises:
        ValueError: `scale` is not a matrix of floating-point numbers.
    """
    if scale.dim() != 2 or not scale.shape[1] or not scale.dtype.is_floating_point:
        raise ValueError(
            f"found scales {tuple(scale.shape)} of {scale.dtype}; two levels are looked for in "
            "floating-point group scales [rows, groups] with at least one group"
        )
    parts = []
    for rows in scale.float().tensor_split([_ROWS] if len(scale) > _ROWS else []):
        part = _of_rows(rows)
        if part is None:
            return None
        parts.append(part)
    units, multiples = zip(*parts, strict=True)
    return torch.cat(units), torch.cat(multiples)


def _of_rows(scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """`two_level` of fp32 scales, by the greatest common divisor of a row's mantissas."""
    low, high = scale.aminmax(dim=1)
    if not bool(((low > 0) & torch.isfinite(high) & (high <= LARGEST * low)).all()):
        return None
    mantissa, exponent = torch.frexp(scale)
    steps = exponent - exponent.amin(dim=1, keepdim=True)  # 5 at most: below 2^29 in all
    whole = (mantissa * 2**24).to(torch.int32) << steps  # 24 bits of mantissa
    multiple = whole // _common_divisor(whole)
    if bool((multiple > LARGEST).any()):
        return None
    return scale[:, 0] / multiple[:, 0], multiple.to(torch.int8)  # a division without a rest


def _common_divisor(whole: Tensor) -> Tensor:
    """Greatest common divisor of each row [N, G]: [N, 1], halving the columns."""
    while (columns := whole.shape[1]) > 1:
        half = columns // 2
        pairs = torch.gcd(whole[:, :half], whole[:, half : 2 * half])
        whole = torch.cat((pairs, whole[:, 2 * half :]), dim=1)
    return whole
