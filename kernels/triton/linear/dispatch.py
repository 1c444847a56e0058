"""Linear layers on a GPU: which kernel takes which weight, and how it wants its input.

| weight                            | input                          | kernel       |
|-----------------------------------|--------------------------------|--------------|
| int4, groups, zero points         | float                          | `w4a16`      |
| int4, groups, zero points         | int8, a scale a row or tensor  | `w4a8`       |
| int4, scales of two levels        | int8, a scale a row or tensor  | `w4a8`       |
| int8, groups, zero points         | float                          | `w8a16`      |
| int8, a scale an output           | int8, a scale a row or tensor  | `w8a8`       |
| e4m3, a scale an output or tensor | e4m3, a scale a row or tensor  | `w8a8`       |
| e4m3, a scale a block of 128x128  | e4m3, a scale a run of 128     | `fp8_block`  |
| float, few rows                   | float                          | `w16a16`     |
| any other, and any other size     | the same, as floats            | cuBLAS       |

Rows of experts go to the same kernels, all experts' at once (`kernels.triton.experts.sorting`).
Two levels (`kernels.two_level`) are seen in the scales; sums over whole rows are then exact.
Behind `w4a16`, `w4a8` and `w8a8` is a second kernel each, for many rows on Hopper (`w4_gluon`,
`w8_gluon`); behind `fp8_block` and `w16a16` cuBLASLt and cuBLAS.
What no kernel takes is dequantized when it is loaded, and its quantized input when it arrives: the
same numbers but for rounding to the float type, at the cost of a float model.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.numerics import dequantize
from kernels.triton.common import Workspace, has_e4m3
from kernels.triton.experts.sorting import SortedRows
from kernels.triton.linear.fp8_block import Fp8BlockWeight, fp8_block_linear, pack_fp8_block
from kernels.triton.linear.packed import fits_tiles
from kernels.triton.linear.w4_many import w4a8_linear, w4a16_linear
from kernels.triton.linear.w4a8 import W4A8Weight, pack_w4a8
from kernels.triton.linear.w4a16 import W4A16Weight, pack_w4a16
from kernels.triton.linear.w8a8 import W8A8Weight, pack_w8a8, w8a8_linear
from kernels.triton.linear.w8a16 import W8A16Weight, pack_w8a16, w8a16_linear
from kernels.triton.linear.w16a16 import fits, takes, w16a16_linear

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class InputFormat:
    """How a linear layer wants the rows of its input.

    Attributes:
        dtype: int8, float8_e4m3fn or the model's float type.
        scale: fp32, one element, for all rows; None where they are scaled by their data, or not.
        group: Inputs of a row that share a scale of their own; None for the whole row.
    """

    dtype: torch.dtype
    scale: Tensor | None = None
    group: int | None = None


@dataclass(frozen=True)
class DenseWeight:
    """A weight [N, K] in the model's float type, with its bias [N] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


GpuWeight = W4A16Weight | W4A8Weight | W8A16Weight | W8A8Weight | Fp8BlockWeight | DenseWeight


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
) -> GpuWeight:
    """Lay a quantized weight out for the kernel that takes it, on the device it is on.

    Args:
        q: int8 (int4 too, one a byte) or e4m3 [N, K]; or of E weights that are packed alike,
            [E, N, K]: scales, zero points, biases and the result then have E before their own.
        scale: fp32 [N, groups].
        zero_point: int8 [N, groups] or None.
        bias: Float [N] or None.
        rows: What its input will be.
        dtype: The model's float type.
        bits: 4 or 8.
        group: Inputs that share a scale; None for all.

    Returns:
        The weight; a `DenseWeight` where no kernel takes it.
    """
    group = group or q.shape[-1]
    own = _packed(q, scale, zero_point, bias, rows, bits, group)
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
) -> GpuWeight | None:
    """The packed weight, or None where no kernel takes it."""
    outputs, inputs, groups = *q.shape[-2:], scale.shape[-1]
    if not fits_tiles(q) or inputs % group or rows.dtype == torch.float32:
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


def takes_sorted_rows(weight: GpuWeight) -> bool:
    """Whether there is a kernel of few rows for a weight, which can take those of each expert."""
    return not isinstance(weight, DenseWeight) or fits(weight.weight)


def tallest_tile(weight: GpuWeight) -> int:
    """The most rows of a tile whose sums a weight's kernel holds in registers."""
    integers = isinstance(weight, W8A8Weight) and weight.packed.dtype == torch.int8
    return 128 if integers or isinstance(weight, W4A16Weight) else 64


def linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: GpuWeight,
    workspace: Workspace,
    dtype: torch.dtype,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """x W^T + bias.

    Args:
        x: [T, K], contiguous, as the layer's `InputFormat` say.
        x_scale: fp32, one element, [T, 1] or [T, K / group]; None for float rows.
        weight: From `pack`.
        workspace: Of the stream that this runs in.
        dtype: Of the result.
        sorted_rows: Of a mixture of experts, which rows are whose: the rows of x are tokens or
            pairs, those of the result pairs, and `weight` is the first of the experts', which lie
            one behind the other.

    Returns:
        [T, N] in `dtype`; sums in fp32 or exact int32.
    """
    if isinstance(weight, DenseWeight):
        return _dense(x, x_scale, weight, workspace, dtype, sorted_rows)
    if isinstance(weight, W4A16Weight):
        return w4a16_linear(x, weight, workspace, out_dtype=dtype, sorted_rows=sorted_rows)
    if isinstance(weight, W8A16Weight):
        return w8a16_linear(x, weight, workspace, out_dtype=dtype, sorted_rows=sorted_rows)
    assert x_scale is not None
    if isinstance(weight, W4A8Weight):
        return w4a8_linear(x, x_scale, weight, workspace, dtype, sorted_rows=sorted_rows)
    if isinstance(weight, W8A8Weight):
        return w8a8_linear(x, x_scale, weight, workspace, dtype, sorted_rows=sorted_rows)
    return fp8_block_linear(x, x_scale, weight, workspace, dtype, sorted_rows=sorted_rows)


def _dense(
    x: Tensor,
    x_scale: Tensor | None,
    weight: DenseWeight,
    workspace: Workspace,
    dtype: torch.dtype,
    sorted_rows: SortedRows | None,
) -> Tensor:
    w = weight.weight
    if x_scale is not None:
        if x_scale.numel() > len(x):  # a scale for each run of 128 inputs
            x_scale = x_scale.repeat_interleave(128, dim=1)[:, : x.shape[1]]
        x = (x.float() * x_scale).to(w.dtype)
    if sorted_rows is not None or takes(x, w):
        return w16a16_linear(x, w, weight.bias, workspace, dtype, sorted_rows=sorted_rows)
    if dtype == w.dtype or not x.is_cuda:
        return F.linear(x, w, weight.bias).to(dtype)
    out = torch.mm(x, w.t(), out_dtype=dtype)  # logits: not rounded to the model's type
    return out if weight.bias is None else out + weight.bias
