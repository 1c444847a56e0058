"""Blocks of weights as ggml lays them out, and weights of ours, bit for bit.

    Q8_0      d fp16, q int8 [32]                                      w = d q
    Q4_0      d fp16, 16 bytes of two q each                           w = d (q - 8)
    Q5_0      d fp16, 32 fifth bits, 16 bytes of two lower halves      w = d (q - 16)
    IQ4_NL    d fp16, 16 bytes of two q each                           w = d LEVELS[q]
    Q4_1      d, m fp16, 16 bytes of two q each                        w = d q + m
    Q5_1      d, m fp16, 32 fifth bits, 16 bytes of two lower halves   w = d q + m
    Q4_K      d, e fp16, 12 bytes of s and m, 4 times 32 bytes of two q each       w = d s q - e m
    Q5_K      d, e fp16, 12 bytes of s and m, 32 bytes of fifth bits, then as Q4_K
    Q6_K      128 bytes of two lower halves, 64 of upper two bits, 16 s int8, d    w = d s (q - 32)

(ggml-common.h). Byte i of the 16 holds q of weight i in its low four bits, of weight i + 16 in the
high ones. d of Q4_0 is negative in about half of the blocks, those whose largest weight is
positive: as int4 with a positive scale it has the zero point -1 there, as int8 it has none.

Blocks of Q4_K and Q5_K have 8 groups of 32 weights, each with s and m of 6 bits. A run of 32 bytes
holds two groups, one in the low four bits; bit g of byte i is the fifth of weight i of group g.
What has a minimum has fp32 zero points here: d q + m = (q - z) d with z = -m / d, exact but for
the rounding of fp32. Q4_K goes back into a file by the units that its scales and minima are
multiples of (`six_bits`).

A block of Q6_K has 16 groups of 16 weights, and is two halves of 64 and of 32 bytes: weight
32 r + i of a half has its low four bits in byte i + 32 (r mod 2), of r > 1 the high ones there, and
the others in bits 2 r and 2 r + 1 of byte i. Layers that run as one with such a one are stored in
groups of 16, too.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from formats.foreign.layout import without_signs
from formats.scheme import FINE, PRESETS, LayerScheme, WeightSpec
from formats.stored.weights import StoredWeight

BLOCK = 32
MOST = 63  # of six bits
BYTES = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "IQ4_NL": 18, "Q4_1": 20}  # of a block
BYTES |= {"Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
INT4_KINDS = {"Q4_0", "Q4_1", "Q4_K"}
MINIMA = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}  # types whose zero points are floats
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
INT8 = LayerScheme(weights=WeightSpec(dtype="int8", granularity="group", group_size=BLOCK))
INT8_FINE = LayerScheme(weights=WeightSpec(dtype="int8", granularity="group", group_size=FINE))
SYMMETRIC = LayerScheme(weights=WeightSpec(dtype="int4", granularity="group", group_size=BLOCK))
INT4 = LayerScheme(
    weights=WeightSpec(dtype="int4", granularity="group", group_size=BLOCK, symmetric=False)
)
_FLOAT = WeightSpec(
    dtype="int8", granularity="group", group_size=BLOCK, symmetric=False, zero_points="float"
)
INT8_FLOAT = LayerScheme(weights=_FLOAT)
INT8_FLOAT_FINE = LayerScheme(weights=_FLOAT.model_copy(update={"group_size": FINE}))
INT4_FLOAT = LayerScheme(weights=_FLOAT.model_copy(update={"dtype": "int4"}))
SUPER_BLOCKS = PRESETS["w4_q4_k"].of_layers


def scheme_of(kinds: Collection[str], *, signed: bool = True) -> LayerScheme | None:
    """How layers of these types that read one input are stored; None where no integers hold them.

    int4 where all have 4 bits in steps of one size, which int8 holds, too; with float zero points
    where one has minima; symmetric where none has and no scale is negative; in groups of 16 where
    one has them.

    Args:
        kinds: Their types.
        signed: Whether blocks of Q4_0 have negative scales.
    """
    if set(kinds) == {"Q4_0"}:
        return INT4 if signed else SYMMETRIC
    if set(kinds) == {"Q4_K"}:
        return SUPER_BLOCKS
    if not set(kinds) <= BYTES.keys():
        return None
    fine = "Q6_K" in kinds
    if not MINIMA & set(kinds):
        return INT8_FINE if fine else INT8
    if fine:
        return INT8_FLOAT_FINE
    return INT4_FLOAT if set(kinds) <= INT4_KINDS else INT8_FLOAT


def has_negative_scales(kind: str, data: np.ndarray) -> bool:
    """Whether a scale of blocks uint8 [N, blocks * bytes of a block] is below zero."""
    high = data.reshape(len(data), -1, BYTES[kind])[..., 1]
    return bool((high > 0x80).any())


def unpacked(kind: str, data: np.ndarray, scheme: LayerScheme) -> StoredWeight:
    """A weight out of its blocks.

    Args:
        kind: One of those of `scheme_of`.
        data: uint8 [N, blocks * bytes of a block].
        scheme: One that holds them.

    Returns:
        q int8 [N, K], scale fp32 [N, groups], and of `INT4` zero points int8 of that shape, of
        schemes with float zero points fp32.

    Raises:
        ValueError: q of a block with a negative scale is -128, whose opposite int8 does not hold.
    """
    blocks = torch.from_numpy(data.copy()).view(len(data), -1, BYTES[kind])
    spec = scheme.weights
    assert spec is not None
    if kind in MINIMA:
        return _with_float_zeros(*_in_groups(spec.block[1], *_with_minima(kind, blocks)))
    scale, rest = _half(blocks[..., :2]), blocks[..., 2:]
    if kind == "Q6_K":
        q, scale = _six_bits(blocks)
    elif kind == "Q8_0":
        q = rest.view(torch.int8)
    elif kind == "Q5_0":
        q = _five_bits(rest) - 16
    elif kind == "IQ4_NL":
        q = torch.tensor(LEVELS, dtype=torch.int8)[_nibbles(rest).int()]
    else:
        q = _nibbles(rest) - 8
    if scheme == INT4:
        group = torch.arange(q.shape[1] * BLOCK) // BLOCK
        zeros = torch.zeros_like(scale, dtype=torch.int8)
        q, scale, zeros = without_signs(q.flatten(1), scale, zeros, group)
        return StoredWeight(q, _used(scale), zeros)
    q, scale, zeros = _in_groups(spec.block[1], q, scale, torch.zeros_like(scale))
    if spec.float_zeros:
        return _with_float_zeros(q, scale, zeros)
    negative = (scale < 0)[..., None]
    if bool((negative & (q == -128)).any()):
        raise ValueError("found -128 in a block with a negative scale")
    return StoredWeight(torch.where(negative, -q, q).flatten(1), _used(scale.abs()))


def _in_groups(size: int, q: Tensor, scale: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, groups, weights], scales and zero points in groups that are shorter, or the same."""
    times = q.shape[2] // size
    q = q.reshape(len(q), q.shape[1] * times, -1)
    return q, scale.repeat_interleave(times, 1), zeros.repeat_interleave(times, 1)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """q int8 [N, groups, 16] and scales fp32 [N, groups] of blocks uint8 [N, blocks, 210]."""
    low = blocks[..., :128].unflatten(-1, (2, 1, 2, 32))  # halves, -, r mod 2, i
    low = torch.cat((low & 15, low >> 4), dim=-3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(2, 2, 1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 1, 32)) >> shifts & 3
    q = (low | high << 4).to(torch.int8) - 32
    scale = blocks[..., 192:208].view(torch.int8) * _half(blocks[..., 208:])[..., None]
    scale = scale.flatten(1)
    return torch.where(scale[..., None] == 0, 0, q.reshape(len(q), -1, FINE)), scale


def _with_minima(kind: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q int8 [N, groups, 32], d and z fp32 [N, groups] of blocks uint8 [N, blocks, bytes]."""
    d, low, rest = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:]
    if kind.endswith("_K"):
        six, rest = rest[..., :12].view(*d.shape, 3, 4), rest[..., 12:]
        a, b, c = six.unbind(-2)  # of groups 0 to 3 in a and b, whose rest and c are of 4 to 7
        steps = torch.cat((a & 63, c & 15 | a >> 6 << 4), dim=-1)
        minima = torch.cat((b & 63, c >> 4 | b >> 6 << 4), dim=-1)
        d = (d[..., None] * steps).flatten(1)
        low = -(low[..., None] * minima).flatten(1)
        runs = rest[..., -128:].unflatten(-1, (4, 32))
        q = torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3, -2)
        if kind == "Q5_K":
            bits = torch.arange(8, dtype=torch.uint8)[:, None]
            q |= (rest[..., None, :32] >> bits & 1) << 4
        q = q.flatten(1, 2).to(torch.int8)
    else:
        q = _five_bits(rest) if kind == "Q5_1" else _nibbles(rest)
    middle = 16 if kind.startswith("Q5") else 8
    flat = d == 0
    q = torch.where(flat[..., None], 0, q - middle)
    return q, d, torch.where(flat, -low, -middle - low / _used(d))


def _with_float_zeros(q: Tensor, scale: Tensor, zeros: Tensor) -> StoredWeight:
    """Of q int8 [N, groups, 32], with scales of any sign: ~q is -1 - q."""
    negative = scale < 0
    q = torch.where(negative[..., None], ~q, q).flatten(1)
    return StoredWeight(q, _used(scale.abs()), torch.where(negative, -1 - zeros, zeros))


def packed(kind: str, weight: StoredWeight) -> np.ndarray:
    """The blocks of a weight in groups of 32 or of whole numbers of these: uint8 [N, bytes].

    Q8_0 takes int8 without zero points, Q4_0 int4 whose zero points are 0 or, with all steps up to
    the other end, -1; Q4_1 takes any integer zero point, and floats where fp16 holds the minimum;
    Q4_K takes floats in groups of 32.

    Raises:
        ValueError: it holds other zero points, or a scale that fp16 does not, or of Q4_K scales or
            minima that are no multiples of 6 bits of fp16 units.
    """
    rows, columns = weight.q.shape
    repeats = columns // BLOCK // weight.scale.shape[1]
    scale = weight.scale.repeat_interleave(repeats, dim=1)
    zeros = weight.zeros.repeat_interleave(repeats, dim=1)
    q = weight.q.view(rows, -1, BLOCK)
    if kind == "Q4_K":
        return _super_blocks(*_with_flat(q, scale, zeros)).flatten(1).numpy()
    if kind == "Q8_0":
        parts = (_bytes(scale), q.view(torch.uint8))
    elif kind == "Q4_0":
        if bool(((zeros != 0) & (zeros != -1)).any()):
            raise ValueError("Q4_0 has no zero points")
        turned = (zeros == -1)[..., None]
        q = torch.where(turned, ~q, q) + 8
        parts = (_bytes(torch.where(zeros == -1, -scale, scale)), _pairs(q))
    elif zeros.is_floating_point():
        parts = _in_fp16(*_with_flat(q, scale, zeros))
    else:
        parts = (_bytes(scale), _bytes(scale * (-8 - zeros.float())), _pairs(q + 8))
    return torch.cat(parts, dim=-1).flatten(1).numpy()


def _with_flat(q: Tensor, scale: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q from 0, scales, the smallest values, and by what fp32 rounded these: all of q's groups.

    The scale is 0 of groups that `_with_minima` found so.
    """
    flat = (q == 0).all(dim=-1) & (scale == 1)
    scale, low = torch.where(flat, 0, scale), torch.where(flat, -zeros, scale * (-8 - zeros))
    q = torch.where(flat[..., None], 0, q + 8).to(torch.uint8)
    return q, scale, low, fp32_rounding(scale, zeros)


def fp32_rounding(scale: Tensor, zeros: Tensor) -> Tensor:
    """How far a minimum may be from the one that a float zero point was made of."""
    return 2.0**-22 * scale * (8 + zeros.abs())


def _in_fp16(q: Tensor, scale: Tensor, low: Tensor, rounding: Tensor) -> tuple[Tensor, ...]:
    """The bytes of Q4_1.

    Raises:
        ValueError: fp16 does not hold a scale or a minimum; what fp32 rounded of it may differ.
    """
    exact = torch.equal(scale.half().float(), scale)
    if not exact or bool(((low.half().float() - low).abs() > rounding).any()):
        raise ValueError("a scale or a minimum is none of fp16")
    return _bytes(scale), _bytes(low), _pairs(q)


def _super_blocks(q: Tensor, scale: Tensor, low: Tensor, rounding: Tensor) -> Tensor:
    """Blocks of Q4_K, uint8 [N, blocks, 144].

    Raises:
        ValueError: scales or minima have no units.
    """
    scale, low, rounding = (x.unflatten(1, (-1, 8)) for x in (scale, low, rounding))
    (d, s), (e, m) = six_bits(scale), six_bits(-low, rounding)
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    (s, s_rest), (m, m_rest) = s.chunk(2, dim=-1), m.chunk(2, dim=-1)
    six = (s | s_rest >> 4 << 6, m | m_rest >> 4 << 6, s_rest & 15 | (m_rest & 15) << 4)
    runs = q.unflatten(1, (-1, 4, 2))
    runs = (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(2)
    return torch.cat((_bytes(d).flatten(2), _bytes(e).flatten(2), *six, runs), dim=-1)


def _used(scale: Tensor) -> Tensor:
    """Scales as they are stored: that of a block of zeros, which is 0, may be any."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _half(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).squeeze(-1).float()


def _bytes(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError("a scale is too large for fp16")
    return half[..., None].contiguous().view(torch.uint8)


def _nibbles(pairs: Tensor) -> Tensor:
    """q int8 [..., 32] out of bytes [..., 16]."""
    return torch.cat((pairs & 15, pairs >> 4), dim=-1).to(torch.int8)


def _five_bits(packed: Tensor) -> Tensor:
    """q int8 [..., 32] out of 4 bytes of fifth bits and 16 of lower halves."""
    high = (packed[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # 8 weights a byte
    return _nibbles(packed[..., 4:]) | high.flatten(-2).to(torch.int8) << 4


def _pairs(q: Tensor) -> Tensor:
    """The inverse, for q from 0 to 15."""
    q = q.to(torch.uint8)
    return q[..., : BLOCK // 2] | q[..., BLOCK // 2 :] << 4


def six_bits(values: Tensor, tolerance: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """The unit and the multiples that the scales or the minima of super-blocks are made of.

    Args:
        values: fp32 or fp64 [..., 8].
        tolerance: How far a product may be from its value.

    Returns:
        (unit of values that fp16 has [..., 1], multiples from 0 to 63 [..., 8]), both in the type
        of `values`: of all such units those with the largest multiples.

    Raises:
        ValueError: a super-block has no such unit.
    """
    top = values.gather(-1, values.abs().argmax(dim=-1, keepdim=True))
    unit, multiple, missing = torch.zeros_like(top), torch.zeros_like(values), top != 0
    for most in range(MOST, 0, -1):
        if not bool(missing.any()):
            break
        one = (top / most).half().to(values.dtype)
        times = torch.round(values / torch.where(one == 0, 1, one))
        exact = (times >= 0) & (times <= MOST)
        exact &= (times * one - values).abs() <= tolerance
        found = exact.all(dim=-1, keepdim=True) & missing
        unit, multiple = torch.where(found, one, unit), torch.where(found, times, multiple)
        missing &= ~found
    if bool(missing.any()):
        raise ValueError("scales or minima are no multiples of 6 bits of an fp16 unit")
    return unit, multiple
