"""Linear layers on a GPU: which weight is packed for which kernel.

| weight                            | input                          | kernel       |
|-----------------------------------|--------------------------------|--------------|
| int4, groups, zero points         | float                          | `weight_only`|
| int4, groups, zero points         | int8, a scale a row or tensor  | `w4a8`       |
| int4, scales of two levels        | int8, a scale a row or tensor  | `w4a8`       |
| fp4 (NVFP4, MXFP4), by 16 or 32   | float                          | `fp4`        |
| int8, groups, zero points         | float                          | `weight_only`|
| int8, a scale an output           | int8, a scale a row or tensor  | `w8a8`       |
| e4m3, a scale an output or tensor | e4m3, a scale a row or tensor  | `w8a8`       |
| e4m3, a scale a block of 128x128  | e4m3, a scale a run of 128     | `fp8_block`  |
| float, few rows                   | float                          | `w16a16`     |
| integers with float zero points   | float                          | cuBLAS       |
| any other, and any other size     | the same, as floats            | cuBLAS       |

A packed weight runs itself (`kernels.triton.linear.weight`). Rows of experts go to the same
kernels, all experts' at once (`kernels.triton.experts`). Two levels (`kernels.two_level`)
are seen in the scales; sums over whole rows are then exact. After 4-bit `weight_only`, `w4a8` and
`w8a8` is a second kernel each, for many rows on Hopper (`kernels.triton.linear.hopper`); after
`w8a8` of e4m3, `fp8_block` and `w16a16` cuBLASLt and cuBLAS.
What no kernel takes is dequantized when it is loaded, and its quantized input when it arrives: the
same numbers but for rounding to the float type, at the cost of a float model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.numerics import dequantize
from kernels.triton.common import has_e4m3
from kernels.triton.linear.fp4 import codes_of_e4m3, fits_fp4, pack_fp4
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.linear.packing import fits_tiles
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import GpuWeight, InputFormat
from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16

FP8 = torch.float8_e4m3fn


def pack(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    rows: InputFormat,
    dtype: torch.dtype,
    *,
    bits: int = 8,
    group: int | None = None,
    unit: Tensor | None = None,
) -> GpuWeight:
    """Lay a quantized weight out for the kernel that takes it, on the device it is on.

    Args:
        q: int8 (int4 too, one a byte) or e4m3 (fp4 too) [N, K]; or of E weights that are packed
            alike, [E, N, K]: scales, zero points, biases and the result then have E before their
            own.
        scale: fp32 [N, groups].
        zero_point: int8 or fp32 [N, groups], or None.
        bias: Float [N] or None.
        dtype: The model's float type.
        bits: 4 or 8.
        group: Inputs that share a scale; None for all.
        unit: fp32 [N, 1], what scales of NVFP4 are e4m3 multiples of; None for others.

    Returns:
        The weight; a `DenseWeight` where no kernel takes it.
    """
    group = group or q.shape[-1]
    own = _packed(q, scale, zero_point, bias, rows, bits, group, unit)
    if own is not None:
        return own
    block = (1,) * (q.dim() - 1) + (group,)
    values = dequantize(q, scale.float(), zero_point, block)
    return DenseWeight(values.to(dtype), None if bias is None else bias.to(dtype))


def _packed(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    rows: InputFormat,
    bits: int,
    group: int,
    unit: Tensor | None,
) -> GpuWeight | None:
    """The packed weight, or None where no kernel takes it."""
    outputs, inputs, groups = *q.shape[-2:], scale.shape[-1]
    if q.dtype == FP8 and bits == 4:
        codes = codes_of_e4m3(q)
        takes = fits_fp4(codes, scale, rows.dtype, unit)
        return pack_fp4(codes, scale, bias, rows.dtype, unit) if takes else None
    if not fits_tiles(q) or inputs % group or rows.dtype == torch.float32:
        return None
    if zero_point is not None and zero_point.is_floating_point():
        return None
    if q.dtype == FP8:
        if rows.dtype != FP8 or not has_e4m3(q.device):
            return None
        blocks = scale[..., ::128, :]
        if rows.group == 128 and group == 128 and outputs % 128 == 0:
            spread = blocks.repeat_interleave(128, -2)
            alike = torch.equal(spread, scale)  # not if merged within one
            return pack_fp8_block(q, blocks.contiguous(), bias) if alike else None
        return pack_w8a8(q, scale, bias) if groups == 1 and rows.group is None else None
    fine = group in (32, 64) or group % 128 == 0
    if bits == 4:
        if not fine or rows.dtype == FP8:
            return None
        make = pack_w4a8 if rows.dtype == torch.int8 else pack_w4a16
        return make(q, scale, bias, zero_point)
    if rows.dtype == torch.int8:
        return pack_w8a8(q, scale, bias) if groups == 1 and zero_point is None else None
    return pack_w8a16(q, scale, bias, zero_point) if fine else None
