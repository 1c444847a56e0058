"""Ranges, scales and rounding: the one home of quantization arithmetic.

One primitive with a block shape covers per-tensor, per-channel, per-group, per-block and
per-token: a tensor is cut into blocks, each block has one scale, and

    q = clamp(round_half_even(x / scale), q_min, q_max),        x' = q * scale.

Symmetric int8 is [-127, 127] with scale = absmax / 127, so that negation is exact. Scales are
fp32. A block of zeros gets `TINY_SCALE`, so that a scale is always finite and positive. The
division is a true fp32 division: fake quantization in calibration, the packed file and every
kernel agree bit for bit on the integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TINY_SCALE = 2.0**-60  # scale of an all-zero block: positive, and its square is still normal


@dataclass(frozen=True)
class QuantizedType:
    """A storage type and the range of integers that quantization uses of it."""

    name: str
    storage: torch.dtype
    q_min: int
    q_max: int


INT8 = QuantizedType("int8", torch.int8, -127, 127)
TYPES: dict[str, QuantizedType] = {INT8.name: INT8}


def block_view(x: Tensor, block: Sequence[int]) -> Tensor:
    """View `x` with every dimension split into (blocks, elements of a block).

    Args:
        x: Any tensor of n dimensions.
        block: n block lengths; -1 spans the whole dimension.

    Returns:
        A view of 2n dimensions: blocks_0, block_0, blocks_1, block_1, ...

    Raises:
        ValueError: `block` has another number of dimensions, or does not divide the shape.
    """
    if len(block) != x.dim():
        raise ValueError(f"block {tuple(block)} has not as many dimensions as {tuple(x.shape)}")
    shape: list[int] = []
    for size, length in zip(x.shape, block, strict=True):
        length = size if length == -1 else length
        if length <= 0 or size % length:
            raise ValueError(f"block {tuple(block)} does not divide shape {tuple(x.shape)}")
        shape += [size // length, length]
    return x.reshape(shape)


def block_absmax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest magnitude of each block: fp32, one element a block, same number of dimensions.

    NaN propagates: a block with a NaN has absmax NaN, which `choose_scale` refuses.
    """
    inner = tuple(range(1, 2 * x.dim(), 2))
    return block_view(x.float().abs(), block).amax(dim=inner)


def choose_scale(absmax: Tensor, dtype: QuantizedType = INT8) -> Tensor:
    """Symmetric scale absmax / q_max in fp32, `TINY_SCALE` where absmax is (nearly) zero.

    Raises:
        ValueError: absmax holds NaN, infinity or a negative number.
    """
    if not bool((torch.isfinite(absmax) & (absmax >= 0)).all()):
        raise ValueError("absmax must be finite and not negative; the data hold NaN or infinity")
    return (absmax.float() / dtype.q_max).clamp(min=TINY_SCALE)


def expand_scale(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat one scale a block to a tensor of `shape` (broadcastable where a block spans a dim)."""
    for dim, (blocks, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if blocks not in (1, size):
            scale = scale.repeat_interleave(size // blocks, dim=dim)
    return scale


def quantize(x: Tensor, scale: Tensor, dtype: QuantizedType = INT8) -> Tensor:
    """Quantize with given scales.

    Args:
        x: Values, any floating dtype.
        scale: fp32 scales, one a block with as many dimensions as `x` (see `block_absmax`), or a
            0-dimensional tensor for the whole of `x`.
        dtype: Storage type and range.

    Returns:
        Tensor of `dtype.storage` with the shape of `x`.
    """
    if scale.dim():
        scale = expand_scale(scale, x.shape)
    q = torch.round(x.float() / scale).clamp_(dtype.q_min, dtype.q_max)
    return q.to(dtype.storage)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in fp32; `scale` as in `quantize`."""
    if scale.dim():
        scale = expand_scale(scale, q.shape)
    return q.float() * scale


def fake_quantize(x: Tensor, scale: Tensor, dtype: QuantizedType = INT8) -> Tensor:
    """Quantize and dequantize: what the kernels will see of `x`, in fp32."""
    return dequantize(quantize(x, scale, dtype), scale)


def sqnr_db(signal: Tensor, noisy: Tensor) -> float:
    """Signal-to-quantization-noise ratio 10 log10(sum x^2 / sum (x - x')^2) in dB.

    Infinite where nothing was lost, 0 dB where all was; sums are in fp64.
    """
    signal64 = signal.double()
    noise = (signal64 - noisy.double()).square().sum().item()
    power = signal64.square().sum().item()
    if noise == 0.0:
        return float("inf")
    return 10.0 * float(torch.log10(torch.tensor(power / noise, dtype=torch.float64)))
