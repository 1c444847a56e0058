"""RMSNorm with a gate, as between the recurrence and the last layer of a block that keeps a state.

    y = norm(x) f(gate) or norm(x f(gate)),   norm(h) = h / sqrt(mean(h^2) + eps) * weight

A program has some parts of rows, each normed by itself, in registers. Nothing is rounded before y.
"""

# pyright: reportMissingImports=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import Gate
from kernels.triton.common import require
from kernels.triton.fused import activate

TILE = 1024  # elements of a program that has several parts


@triton.jit(do_not_specialize=["count"])
def gated_norm_kernel(
    x, gate, weight, out, eps, count, x_row, gate_row, SIZE, GROUPS: tl.constexpr,
    SILU: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Parts of SIZE elements, of `count` in all, GROUPS of a row."""
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    row, group = (part // GROUPS).to(tl.int64)[:, None], (part % GROUPS)[:, None]
    i = group * SIZE + tl.arange(0, WIDTH)[None, :]
    real = (part < count)[:, None] & (tl.arange(0, WIDTH) < SIZE)[None, :]
    h = tl.load(x + row * x_row + i, mask=real, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + i, mask=real, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    factor = activate(g, "silu") if SILU else 1.0 / (1.0 + tl.exp(-g))
    if FIRST:
        h *= factor
    y = h * (1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / SIZE + eps))[:, None] * w
    if not FIRST:
        y *= factor
    tl.store(out + row * (GROUPS * SIZE) + i, y.to(out.dtype.element_ty), mask=real)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: Gate) -> Tensor:
    """The norm of rows with a gate.

    Args:
        x: Float [..., H]; of two dimensions, rows may be parts of longer ones.
        gate: Float, of the shape of `x`; its rows may be such parts too.
        weight: Float [H].
        eps: Added to the mean square.
        form: Where the gate stands, and what it is.

    Returns:
        Like `x`, contiguous.

    Raises:
        ValueError: a shape does not fit.
    """
    size = x.shape[-1]
    require(
        gate.shape == x.shape and weight.shape == (size,) and size % form.groups == 0,
        f"x, gate and weight are {tuple(x.shape)}, {tuple(gate.shape)} and {tuple(weight.shape)}; "
        f"needed are [..., H] twice and [H], H a multiple of {form.groups}",
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    own, by = (y.reshape(-1, size) for y in (x, gate))
    own, by = (y if y.stride(1) == 1 else y.contiguous() for y in (own, by))
    count, part = len(own) * form.groups, size // form.groups
    if count:
        width = triton.next_power_of_2(part)
        parts = max(1, TILE // width)
        gated_norm_kernel[(triton.cdiv(count, parts),)](
            own, by, weight, out, eps, count, own.stride(0), by.stride(0), part,
            GROUPS=form.groups, SILU=form.silu, FIRST=form.first, PARTS=parts, WIDTH=width,
            num_warps=min(16, max(4, width // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return out
