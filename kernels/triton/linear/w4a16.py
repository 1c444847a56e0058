"""W4A16: 4-bit weights in groups of inputs, fp16 or bf16 activations.

How a weight is laid out in memory says `kernels.triton.linear.operands`, how it is multiplied
`kernels.triton.linear.weight_only`; on sm_90 more than some tens of rows go to
`kernels.triton.linear.hopper.w4`, where it takes the weight.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kernels.triton.experts.sorting import SortedRows
from kernels.triton.linear.hopper.w4_launch import Levels, launch_w4, many_rows_tile, takes
from kernels.triton.linear.launch import Product
from kernels.triton.linear.weight_only import FloatInputWeight, pack_float_input
from kernels.triton.tuning import Tile


class W4A16Weight(FloatInputWeight):
    """A 4-bit weight for float rows; `packed` is int32 [K / 128, N / 64, 1024]."""

    BITS: ClassVar[int] = 4

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 128

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut; None for cuBLAS, on a passing copy of the weight."""
        found = None
        if sorted_rows is None and takes(self, Levels(self.scale), dtype):
            found = many_rows_tile(self.family, x.device, len(x), *self.size)
        return found or self.plain_tile(x, dtype, sorted_rows)

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows."""
        launch_w4(self, Levels(self.scale), product, tile)


def pack_w4a16(
    q: Tensor, scale: Tensor, bias: Tensor | None = None, zero_point: Tensor | None = None
) -> W4A16Weight:
    """Lay a quantized weight out, on the device it is on.

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
    return pack_float_input(W4A16Weight, q, scale, bias, zero_point)
