"""Blocks of 32 weights as ggml lays them out, and weights of ours, bit for bit.

    Q8_0      d fp16, q int8 [32]                                      w = d q
    Q4_0      d fp16, 16 bytes of two q each                           w = d (q - 8)
    Q5_0      d fp16, 32 fifth bits, 16 bytes of two lower halves      w = d (q - 16)
    IQ4_NL    d fp16, 16 bytes of two q each                           w = d LEVELS[q]
    Q4_1      d, m fp16, 16 bytes of two q each                        w = d q + m

(ggml-common.h). Byte i of the 16 holds q of weight i in its low four bits, of weight i + 16 in the
high ones. d of Q4_0 is negative in about half of the blocks, those whose largest weight is
positive: as int4 with a positive scale it has the zero point -1 there, as int8 it has none.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from formats.foreign.layout import without_signs
from formats.scheme import LayerScheme, WeightSpec
from formats.stored.weights import StoredWeight

BLOCK = 32
BYTES = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "IQ4_NL": 18, "Q4_1": 20}  # of a block
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
INT8 = LayerScheme(weights=WeightSpec(dtype="int8", granularity="group", group_size=BLOCK))
SYMMETRIC = LayerScheme(weights=WeightSpec(dtype="int4", granularity="group", group_size=BLOCK))
INT4 = LayerScheme(
    weights=WeightSpec(dtype="int4", granularity="group", group_size=BLOCK, symmetric=False)
)


def scheme_of(kinds: Collection[str], *, signed: bool = True) -> LayerScheme | None:
    """How layers of these types that read one input are stored; None where no integers hold them.

    int4 where all are Q4_0, which int8 holds, too; symmetric where no scale is negative.

    Args:
        kinds: Their types.
        signed: Whether blocks of Q4_0 have negative scales.
    """
    if set(kinds) == {"Q4_0"}:
        return INT4 if signed else SYMMETRIC
    return INT8 if set(kinds) <= {"Q8_0", "Q4_0", "Q5_0", "IQ4_NL"} else None


def has_negative_scales(kind: str, data: np.ndarray) -> bool:
    """Whether a scale of blocks uint8 [N, blocks * bytes of a block] is below zero."""
    high = data.reshape(len(data), -1, BYTES[kind])[..., 1]
    return bool((high > 0x80).any())


def unpacked(kind: str, data: np.ndarray, scheme: LayerScheme) -> StoredWeight:
    """A weight out of its blocks.

    Args:
        kind: One of those of `scheme_of`.
        data: uint8 [N, blocks * bytes of a block].
        scheme: `INT8`, `INT4` or `SYMMETRIC`.

    Returns:
        q int8 [N, K], scale fp32 [N, K / 32], and of `INT4` zero points int8 of that shape.

    Raises:
        ValueError: q of a block with a negative scale is -128, whose opposite int8 does not hold.
    """
    blocks = torch.from_numpy(data.copy()).view(len(data), -1, BYTES[kind])
    scale, rest = _half(blocks[..., :2]), blocks[..., 2:]
    if kind == "Q8_0":
        q = rest.view(torch.int8)
    elif kind == "Q5_0":
        high = (rest[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # 8 weights a byte
        q = (_nibbles(rest[..., 4:]) | high.flatten(-2).to(torch.int8) << 4) - 16
    elif kind == "IQ4_NL":
        q = torch.tensor(LEVELS, dtype=torch.int8)[_nibbles(rest).int()]
    else:
        q = _nibbles(rest) - 8
    if scheme == INT4:
        group = torch.arange(q.shape[1] * BLOCK) // BLOCK
        zeros = torch.zeros_like(scale, dtype=torch.int8)
        q, scale, zeros = without_signs(q.flatten(1), scale, zeros, group)
        return StoredWeight(q, _used(scale), zeros)
    negative = (scale < 0)[..., None]
    if bool((negative & (q == -128)).any()):
        raise ValueError("found -128 in a block with a negative scale")
    return StoredWeight(torch.where(negative, -q, q).flatten(1), _used(scale.abs()))


def packed(kind: str, weight: StoredWeight) -> np.ndarray:
    """The blocks of a weight in groups of 32 or of whole numbers of these: uint8 [N, bytes].

    Q8_0 takes int8 without zero points, Q4_0 int4 whose zero points are 0 or, with all steps up to
    the other end, -1; Q4_1 takes any zero point.

    Raises:
        ValueError: it holds other zero points, or a scale that fp16 does not.
    """
    rows, columns = weight.q.shape
    repeats = columns // BLOCK // weight.scale.shape[1]
    scale = weight.scale.repeat_interleave(repeats, dim=1)
    zeros = torch.zeros_like(scale, dtype=torch.int8)
    if weight.zero_point is not None:
        zeros = weight.zero_point.repeat_interleave(repeats, dim=1)
    q = weight.q.view(rows, -1, BLOCK)
    if kind == "Q8_0":
        parts = (_bytes(scale), q.view(torch.uint8))
    elif kind == "Q4_0":
        if bool(((zeros != 0) & (zeros != -1)).any()):
            raise ValueError("Q4_0 has no zero points")
        turned = (zeros == -1)[..., None]
        q = torch.where(turned, ~q, q) + 8
        parts = (_bytes(torch.where(zeros == -1, -scale, scale)), _pairs(q))
    else:
        low = scale * (-8 - zeros.float())
        parts = (_bytes(scale), _bytes(low), _pairs(q + 8))
    return torch.cat(parts, dim=-1).flatten(1).numpy()


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


def _pairs(q: Tensor) -> Tensor:
    """The inverse, for q from 0 to 15."""
    q = q.to(torch.uint8)
    return q[..., : BLOCK // 2] | q[..., BLOCK // 2 :] << 4
