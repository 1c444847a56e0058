"""Ranges, scales and rounding: the one home of quantization arithmetic.

One primitive with a block shape covers per-tensor, per-channel, per-group, per-block and
per-token: a tensor is cut into blocks, each block has one scale, and

    q = clamp(round_half_even(x / scale), q_min, q_max),        x' = q * scale.

Symmetric int8 is [-127, 127] with scale = absmax / 127, so that negation is exact; int4 is [-8, 7]
with absmax / 7.5; fp8 is e4m3 with absmax / 448, clamped before the cast, which rounds half to
even; fp4 is e2m1, of the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with absmax / 6.
Asymmetric integers have a zero point z: q = clamp(round(x / scale) + z), x' = (q - z) scale; of one
that is a float, q = clamp(round(x / scale + z)).
Scales are fp32. A block of zeros gets `TINY_SCALE`, so that a scale is always finite and positive.
Some formats store other scales: powers of two (`choose_power`), or e4m3 values times a unit
(`e4m3_multiples`), both exact in fp32.
The division is a true fp32 division: fake quantization in calibration, the packed file and every
kernel agree bit for bit on the integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_E4M3 = 2.0**-9  # its smallest positive value
TINY_SCALE = 2.0**-60  # scale of an all-zero block: positive, and its square is still normal


@dataclass(frozen=True)
class QuantizedType:
    """A storage type, the range of values that quantization uses of it, and what absmax maps to.

    Attributes:
        name: As recipes and scale tables call it.
        storage: Element type that holds it; int4 is held one a byte until it is packed, and fp4 as
            e4m3, which has all of its values.
        q_min: Smallest value.
        q_max: Largest value.
        top: The value that the largest magnitude of a block is scaled to. For int4 it is 7.5, half
            a step beyond the range: the step is finer, and the one value that is cut loses no more
            than rounding loses elsewhere.
        reach: Half a step beyond the range: what is cut to `q_max` and loses no more than that.
    """

    name: str
    storage: torch.dtype
    q_min: int
    q_max: int
    top: float
    reach: float


INT8 = QuantizedType("int8", torch.int8, -127, 127, 127.0, 127.5)
INT4 = QuantizedType("int4", torch.int8, -8, 7, 7.5, 7.5)
FP8 = QuantizedType("fp8_e4m3", torch.float8_e4m3fn, -448, 448, 448.0, 464.0)
FP4 = QuantizedType("fp4_e2m1", torch.float8_e4m3fn, -6, 6, 6.0, 7.0)
TYPES: dict[str, QuantizedType] = {kind.name: kind for kind in (INT8, INT4, FP8, FP4)}


@dataclass(frozen=True)
class E4M3Multiples:
    """How NVFP4 stores scales: as e4m3 values times a number that a tensor's scales share.

    Attributes:
        unit: That number, a power of two. A weight whose scales are beyond its multiples has a
            larger one.
    """

    unit: float


ScaleStorage = torch.dtype | E4M3Multiples


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


def pad_to_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """`x` with zeros appended to each dimension up to whole blocks."""
    missing = [0 if n == -1 else -size % n for size, n in zip(x.shape, block, strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [amount for size in reversed(missing) for amount in (0, size)])


def block_absmax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest magnitude of each block: fp32, one element a block, same number of dimensions.

    Blocks at an edge may be smaller. NaN propagates: a block with a NaN has absmax NaN, which
    `choose_scale` refuses.
    """
    inner = tuple(range(1, 2 * x.dim(), 2))
    return block_view(pad_to_blocks(x.float().abs(), block), block).amax(dim=inner)


def divide(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once on every device: by a number, a GPU multiplies by its reciprocal."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def choose_scale(absmax: Tensor, dtype: QuantizedType = INT8) -> Tensor:
    """Symmetric scale absmax / top in fp32, `TINY_SCALE` where absmax is (nearly) zero.

    Raises:
        ValueError: absmax holds NaN, infinity or a negative number.
    """
    if not bool((torch.isfinite(absmax) & (absmax >= 0)).all()):
        raise ValueError("absmax must be finite and not negative; the data hold NaN or infinity")
    return divide(absmax.float(), dtype.top).clamp(min=TINY_SCALE)


def outer_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 scales of matrices whose element (i, j) has the product of its row's and its column's.

    rows[i] is the root of the largest |x[i, j]|, columns[j] the largest |x[i, j]| / rows[i] over
    127. No element is beyond the range, and steps are finer than by rows alone where both
    rows and columns differ in size. NaN gives NaN.

    Args:
        x: [..., R, C].

    Returns:
        rows fp32 [..., R, 1] and columns fp32 [..., 1, C].
    """
    size = x.float().abs()
    rows = size.amax(-1, keepdim=True).sqrt().clamp(min=TINY_SCALE)
    columns = divide((size / rows).amax(-2, keepdim=True), INT8.top).clamp(min=TINY_SCALE)
    return rows, columns


def choose_power(absmax: Tensor, dtype: QuantizedType) -> Tensor:
    """The least power of two that absmax divided by is at most `dtype.reach`: fp32.

    Raises:
        ValueError: absmax holds NaN, infinity or a negative number.
    """
    least = choose_scale(absmax, dataclasses.replace(dtype, top=dtype.reach))
    return power_above(least)


def power_above(x: Tensor) -> Tensor:
    """The least power of two that is no smaller, of positive normal fp32 values."""
    return ((x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def e4m3_unit(absmax: Tensor) -> Tensor:
    """A power of two u with room for e4m3 multiples of it twice as large as absmax: fp32.

    Multiples as small as absmax / 14336 keep all their bits.
    """
    return power_above((absmax.float() / (FP8.top / 2)).clamp(min=TINY_SCALE))


def e4m3_multiples(scale: Tensor, unit: Tensor | float) -> Tensor:
    """The positive e4m3 values times a unit that are next to scales: fp32."""
    codes = (scale / unit).clamp(min=_LEAST_E4M3, max=FP8.top).to(torch.float8_e4m3fn)
    return codes.float() * unit


def choose_affine(low: Tensor, high: Tensor, dtype: QuantizedType) -> tuple[Tensor, Tensor]:
    """Scale and zero point that map [low, high], widened to contain 0, onto the whole range.

    Args:
        low: Smallest value of each block, finite.
        high: Largest value of each block, finite.
        dtype: An integer type.

    Returns:
        (fp32 scale, zero point in the type's storage): x' = (q - zero_point) * scale, and 0 is
        exactly representable.
    """
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError("range must be finite; the data hold NaN or infinity")
    scale = divide(high - low, dtype.q_max - dtype.q_min).clamp(min=TINY_SCALE)
    zero_point = (dtype.q_min - torch.round(low / scale)).clamp(dtype.q_min, dtype.q_max)
    return scale, zero_point.to(dtype.storage)


def expand_scale(scale: Tensor, shape: Sequence[int], block: Sequence[int] | None = None) -> Tensor:
    """Repeat one scale a block to a tensor of `shape` (broadcastable where a block spans a dim).

    Args:
        scale: One element a block.
        shape: Of the tensor that is scaled.
        block: Block lengths, needed where blocks at an edge are smaller.
    """
    for dim, (blocks, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if blocks not in (1, size):
            length = size // blocks if block is None else block[dim]
            scale = scale.repeat_interleave(length, dim=dim).narrow(dim, 0, size)
    return scale


def quantize(
    x: Tensor,
    scale: Tensor,
    dtype: QuantizedType = INT8,
    zero_point: Tensor | None = None,
    block: Sequence[int] | None = None,
) -> Tensor:
    """Quantize with given scales.

    Args:
        x: Values, any floating dtype.
        scale: fp32 scales, one a block with as many dimensions as `x` (see `block_absmax`), or a
            0-dimensional tensor for the whole of `x`.
        dtype: Storage type and range.
        zero_point: Of the scale's shape, or None for symmetric quantization.
        block: Block lengths, needed where blocks at an edge are smaller.

    Returns:
        Tensor of `dtype.storage` with the shape of `x`.
    """
    if scale.dim():
        scale = expand_scale(scale, x.shape, block)
    scale = scale.to(x.device)  # by one number of the host a GPU multiplies, by its reciprocal
    zeros = None if zero_point is None else expand_scale(zero_point.float(), x.shape, block)
    if zeros is not None and zero_point is not None and zero_point.is_floating_point():
        return round_to(x.float() / scale + zeros, dtype).to(dtype.storage)
    return round_to(x.float() / scale, dtype, zeros).to(dtype.storage)


def round_to(x: Tensor, dtype: QuantizedType, zeros: Tensor | None = None) -> Tensor:
    """The values of a type next to those of `x`, half to even, in the type of `x`.

    Args:
        x: Floats; they are overwritten.
        dtype: Type to round to.
        zeros: Zero point of each element, added before what is beyond the range is cut.
    """
    if dtype is FP4:  # steps of 0.5 up to 2, 1 up to 4, 2 up to 6: half the power of two below
        power = x.abs().clamp_(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
        step = power.view(torch.float32).mul_(0.5)
        return x.div_(step).round_().mul_(step).clamp_(dtype.q_min, dtype.q_max)
    if dtype.storage.is_floating_point:
        return x.clamp_(dtype.q_min, dtype.q_max).to(dtype.storage).to(x.dtype)
    x = x.round_() if zeros is None else x.round_().add_(zeros)
    return x.clamp_(dtype.q_min, dtype.q_max)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    block: Sequence[int] | None = None,
) -> Tensor:
    """(q - zero_point) * scale in fp32; arguments as in `quantize`."""
    if scale.dim():
        scale = expand_scale(scale, q.shape, block)
    wide = q.float()
    if zero_point is not None:
        wide = wide - expand_scale(zero_point.float(), q.shape, block)
    return wide * scale


def fake_quantize(x: Tensor, scale: Tensor, dtype: QuantizedType = INT8) -> Tensor:
    """Quantize and dequantize: what the kernels will see of `x`, in fp32."""
    return dequantize(quantize(x, scale, dtype), scale)


def fake_quantize_activations(
    x: Tensor, scale: Tensor | None, dtype: QuantizedType = INT8, group: int = -1
) -> Tensor:
    """What a quantized linear layer sees of its input.

    Args:
        x: [..., K].
        scale: Static scale, one element, or None where scales follow from the data.
        dtype: Quantized type.
        group: Elements of a row that share a scale where it follows from the data; -1 for all.

    Returns:
        fp32, of the shape of `x`.
    """
    if scale is not None:
        return fake_quantize(x, scale.reshape(()), dtype)
    rows = x.reshape(-1, x.shape[-1])
    block = (1, group)
    scales = choose_scale(block_absmax(rows, block), dtype)
    q = quantize(rows, scales, dtype, block=block)
    return dequantize(q, scales, block=block).reshape(x.shape)


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
