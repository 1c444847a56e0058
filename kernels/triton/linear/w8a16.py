"""W8A16: int8 weights with one scale an output channel or group, fp16 or bf16 activations.

How a weight lies in memory says `kernels.triton.linear.operands`, how it is multiplied
`kernels.triton.linear.weight_only`. Integers are exact in either type, zero points taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.common import Workspace
from kernels.triton.experts.sorting import SortedRows
from kernels.triton.linear.operands import pack_tiles
from kernels.triton.linear.packed import GroupedWeight, check_grouped, lay_bias, lay_scales
from kernels.triton.linear.weight_only import dequantize, weight_only_linear
from kernels.triton.tuning import Tile


class W8A16Weight(GroupedWeight):
    """A weight packed for `w8a16_linear`; `packed` is int32 [K / 128, N / 64, 2048]."""


def pack_w8a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W8A16Weight:
    """Lay a quantized weight out for `w8a16_linear`, on the device it is on.

    Args:
        q: int8 [N, K]; N a multiple of 64, K of 128.
        scale: Float [N, 1], or [N, groups], groups of 32, 64 or a multiple of 128 inputs.
        bias: Float [N] or None.
        zero_point: int8 [N, groups], or None for zeros.

    Raises:
        ValueError: a shape or type is another.
    """
    check_grouped(q, scale, zero_point, 8)
    scales, group, zeros = lay_scales(scale, zero_point, q.shape[-1], 8, keep_whole=True)
    return W8A16Weight(pack_tiles(q, 8), scales, lay_bias(bias, q), group, zeros)


def dequantize_w8a16(weight: W8A16Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16 or bf16, the product in fp32 and rounded to it."""
    return dequantize(weight, 8, dtype)


def w8a16_linear(
    x: Tensor,
    weight: W8A16Weight,
    workspace: Workspace,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """As `kernels.triton.linear.w4a16.w4a16_linear`, of a weight from `pack_w8a16`."""
    return weight_only_linear(x, weight, 8, workspace, tile, out_dtype, sorted_rows)
