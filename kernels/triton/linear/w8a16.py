"""W8A16: int8 weights with one scale an output channel or group, fp16 or bf16 activations.

How a weight is laid out in memory says `kernels.triton.linear.operands`, how it is multiplied
`kernels.triton.linear.weight_only`. Integers are exact in either type, zero points taken.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kernels.triton.linear.weight_only import FloatInputWeight, pack_float_input


class W8A16Weight(FloatInputWeight):
    """An int8 weight for float rows; `packed` is int32 [K / 128, N / 64, 2048]."""

    BITS: ClassVar[int] = 8


def pack_w8a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W8A16Weight:
    """Lay a quantized weight out, on the device it is on.

    Args:
        q: int8 [N, K]; N a multiple of 64, K of 128.
        scale: Float [N, 1], or [N, groups], groups of 32, 64 or a multiple of 128 inputs.
        bias: Float [N] or None.
        zero_point: int8 [N, groups], or None for zeros.

    Raises:
        ValueError: a shape or type is another.
    """
    return pack_float_input(W8A16Weight, q, scale, bias, zero_point)
