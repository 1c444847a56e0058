"""W4A16: 4-bit weights in groups of inputs, fp16 or bf16 activations.

How a weight lies in memory says `kernels.triton.linear.operands`, how it is multiplied
`kernels.triton.linear.weight_only`.
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


class W4A16Weight(GroupedWeight):
    """A weight packed for `w4a16_linear`; `packed` is int32 [K / 128, N / 64, 1024]."""


def pack_w4a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W4A16Weight:
    """Lay a quantized weight out for `w4a16_linear`, on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, groups], groups of 32, 64 or a multiple of 128 inputs. Without zero points
            its type is kept. fp32 is faster: of tiles of fewer than 256 outputs 16-bit scales are
            too small for asynchronous loads, and are waited for.
        bias: Float [N] or None.
        zero_point: int8 [N, groups] in [-8, 7], or None for zeros.

    Raises:
        ValueError: a shape, type or value is another.
    """
    check_grouped(q, scale, zero_point, 4)
    scales, group, zeros = lay_scales(scale, zero_point, q.shape[-1], 4)
    return W4A16Weight(pack_tiles(q, 4), scales, lay_bias(bias, q), group, zeros)


def dequantize_w4a16(weight: W4A16Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16 or bf16, scale and product rounded to it."""
    return dequantize(weight, 4, dtype)


def w4a16_linear(
    x: Tensor,
    weight: W4A16Weight,
    workspace: Workspace,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """x W^T + bias.

    Args:
        x: fp16 or bf16 [M, K], contiguous.
        weight: From `pack_w4a16`, on the device of `x`.
        workspace: Of the stream that this runs in.
        tile: How to cut it; by default the device's table says.
        out_dtype: Element type of the result; by default that of `x`.
        sorted_rows: Which rows are whose, if `weight` is the first of those of experts that lie one
            behind the other: rows of `x` are tokens or pairs, those of the result pairs.

    Returns:
        [M, N]; sums in fp32.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    return weight_only_linear(x, weight, 4, workspace, tile, out_dtype, sorted_rows)
