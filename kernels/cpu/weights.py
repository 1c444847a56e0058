"""Weights of linear layers as the CPU's ops want them: packed once, when a checkpoint is loaded.

With compiled kernels a weight of any format is one block of bytes; without them it is what
torch's own products take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.structures import FLOATS
from kernels.numerics import TYPES, dequantize


class _Tensors:
    """A weight whose memory is that of its tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True)
class NativeWeight(_Tensors):
    """A weight of any format in the layout of the compiled kernels.

    Attributes:
        packed: uint8, one dimension: integers or floats, scales, zero points and bias; see
            `kernels/cpu/csrc/api.h`.
        outputs: N.
    """

    packed: Tensor
    outputs: int


@dataclass(frozen=True)
class Int8Weight(_Tensors):
    """An int8 weight with one scale an output channel, as torch's own products want it.

    Attributes:
        packed: The integers, [N, K], held in fp32.
        scale: fp32 [N].
        bias: fp32 [N] or None.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class FloatWeight(_Tensors):
    """A weight [N, K] with its bias [N] or None, in the floating-point type to compute in."""

    packed: Tensor
    bias: Tensor | None


Weight = NativeWeight | Int8Weight | FloatWeight


def pack_float_weight(
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Weight:
    """Lay an unquantized weight out for `linear`; done once, when a checkpoint is loaded.

    Args:
        weight: Float [N, K]; held as it is where the kernels widen it to fp32 on their way.
        bias: Float [N] or None.
        dtype: Type to compute in.
    """
    weight = weight.detach()
    if native.library() is not None and dtype == torch.float32:
        held = weight if weight.dtype in FLOATS else weight.float()
        packed = native.pack(held, FLOATS[held.dtype], bias=bias)
        return NativeWeight(packed, weight.shape[0])
    bias = None if bias is None else bias.detach().to(dtype)
    return FloatWeight(weight.to(dtype).contiguous(), bias)


def pack_quantized_weight(
    q: Tensor,
    scale: Tensor,
    dtype: str,
    zero_point: Tensor | None = None,
    group: int | None = None,
    bias: Tensor | None = None,
    *,
    integer_inputs: bool = False,
) -> Weight:
    """Lay a quantized weight out for `linear`; done once, when a checkpoint is loaded.

    Args:
        q: [N, K], int8 (int4 too, one a byte) or e4m3.
        scale: fp32 [N, groups].
        dtype: `int8`, `int4` or `fp8_e4m3`.
        zero_point: int8 or, where inputs stay floats, fp32 [N, groups]; None for none.
        group: Inputs that share a scale; None for all.
        bias: Float [N] or None.
        integer_inputs: Whether its inputs will be int8.

    Raises:
        ValueError: a type or shape is another than these, values are out of range, or zero points
            are floats for integer inputs.
    """
    if integer_inputs and zero_point is not None and zero_point.is_floating_point():
        raise ValueError("zero points are floats; weights of integer inputs have int8 ones")
    _check_quantized(q, scale, dtype, zero_point, group)
    if native.library() is not None:
        return NativeWeight(native.pack(q, dtype, scale, zero_point, bias, group), q.shape[0])
    bias = None if bias is None else bias.float()
    if integer_inputs and dtype == "int8" and group is None and zero_point is None:
        flat = scale.detach().float().reshape(-1).contiguous()
        return Int8Weight(q.float().contiguous(), flat, bias)
    values = dequantize(q, scale.float(), zero_point, (1, group or -1))
    return FloatWeight(values.contiguous(), bias)


def _check_quantized(
    q: Tensor, scale: Tensor, dtype: str, zero_point: Tensor | None, group: int | None
) -> None:
    kind = TYPES[dtype]
    if q.dtype != kind.storage or q.dim() != 2:
        raise ValueError(
            f"weight is {q.dtype} {tuple(q.shape)}; {dtype} needs {kind.storage} [N, K]"
        )
    wanted = (q.shape[0], 1 if group is None else -(-q.shape[1] // group))
    for what, found in (("scales", scale), ("zero points", zero_point)):
        if found is not None and tuple(found.shape) != wanted:
            raise ValueError(f"{what} have shape {tuple(found.shape)}; needed is {wanted}")
    if kind.storage.is_floating_point or not q.numel():
        return
    low = -128 if dtype == "int8" else kind.q_min  # of others' scales, absmax / 127.5
    least, most = int(q.min()), int(q.max())
    if least < low or most > kind.q_max:
        raise ValueError(f"weight holds {least} to {most}; {dtype} is [{low}, {kind.q_max}] here")
