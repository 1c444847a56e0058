"""What rounding a weight in groups of inputs costs its outputs, in one pass over the weight."""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.numerics import QuantizedType
from kernels.triton.calibration.feedback import FLOATS, nearest
from kernels.triton.common import capability, require

GROUPS = (16, 32, 64, 128)  # inputs of a group
ROWS, FEW = 64, 16  # of a program, from Hopper on and before


@triton.jit
def _errors_kernel(
    weight, scales, zeros, moments, out, size, groups, together,
    LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    ZEROS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, GROUP)
    real, columns = n < size, groups * GROUP
    first = group * GROUP
    w = tl.load(
        weight + n.to(tl.int64)[:, None] * columns + first + k, mask=real[:, None], other=0.0
    ).to(tl.float32)
    block = (n // together) * groups + group
    scale = tl.load(scales + block, mask=real, other=1.0)[:, None]
    zero = tl.zeros_like(scale)
    if ZEROS:
        zero = tl.load(zeros + block, mask=real, other=0).to(tl.float32)[:, None]
    q = nearest(tl.div_rn(w, scale + tl.zeros_like(w)), zero, LOW, HIGH, MANTISSA, LEAST)
    error = w - (q - zero) * scale
    # Symmetric: read by columns, as tensor cores take fp32.
    h = tl.load(moments + (first + k).to(tl.int64)[None, :] * columns + (first + k)[:, None])
    carried = tl.dot(error, h, input_precision="tf32")
    tl.store(out + n * groups + group, tl.sum(carried * error, axis=1), mask=real)


def takes(kind: QuantizedType, group: int, columns: int) -> bool:
    """Whether the kernel knows a type, and groups of so many inputs."""
    known = kind.name in FLOATS or kind.storage == torch.int8
    return known and group in GROUPS and columns % group == 0


def group_errors(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    moments: Tensor,
    kind: QuantizedType,
    rows: int,
) -> Tensor:
    """e H e^T of each row and group, e the rounding error, H the moments of the group's inputs.

    Args:
        weight: [N, K] float.
        scale: fp32 [ceil(N / rows), groups].
        zero_point: Of the scale's shape, or None.
        moments: fp32 [K, K].
        rows: Of a weight that have one scale.

    Returns:
        fp32 [N, groups]; products in TF32.
    """
    size, columns = weight.shape
    groups = scale.shape[1]
    group = columns // groups
    require(takes(kind, group, columns), f"groups of {group} of {columns} inputs are not taken")
    require(scale.shape[0] == -(-size // rows), f"scales of {scale.shape[0]} blocks of rows")
    found = torch.empty(size, groups, device=weight.device)
    tall = ROWS if capability() >= 90 else FEW
    mantissa, least = FLOATS.get(kind.name, (-1, 0))
    _errors_kernel[(groups, triton.cdiv(size, tall))](
        weight.contiguous(),
        scale.contiguous(),
        scale if zero_point is None else zero_point.contiguous(),
        moments.contiguous(),
        found,
        size,
        groups,
        rows,
        LOW=float(kind.q_min),
        HIGH=float(kind.q_max),
        MANTISSA=mantissa,
        LEAST=least,
        ZEROS=zero_point is not None,
        GROUP=group,
        ROWS=tall,
        num_warps=8,
    )
    return found
