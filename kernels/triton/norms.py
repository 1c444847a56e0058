"""RMSNorms that end in floats: of q and k over all of their heads, and of rows with a gate.

q and k are normed as they lie in the rows of a joint projection (OLMo Team 2024, arXiv 2501.00656,
norm all of q and of k). Families that norm each head have it in
`kernels.triton.attention.rope_cache`, whose programs hold whole heads, not whole rows.

A gate is between the recurrence and the last layer of a block that keeps a state:

    y = norm(x) f(gate) or norm(x f(gate)),   norm(h) = h / sqrt(mean(h^2) + eps) * weight

A program has some parts of rows, each normed by itself, in registers. Nothing is rounded before y.
"""

# pyright: reportCallIssue=false, reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import Gate
from kernels.triton.common import EARLY_ROWS, overlap, require, wait_and_announce
from kernels.triton.fused import activate


@triton.jit
def norm_projections_kernel(
    x, q_norm, k_norm, eps, pitch, Q_SIZE, K_SIZE, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program (row, 0 for q or 1 for k); WIDTH is the larger size, up to a power of two."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.where(part == 0, Q_SIZE, K_SIZE)
    i = tl.arange(0, WIDTH)
    real = i < size
    if part == 0:
        w = tl.load(q_norm + i, mask=real, other=0.0).to(tl.float32)
    else:
        w = tl.load(k_norm + i, mask=real, other=0.0).to(tl.float32)
    places = x + row * pitch + part * Q_SIZE + i
    wait_and_announce(OVERLAP)
    h = tl.load(places, mask=real, other=0.0).to(tl.float32)
    y = h * (1.0 / tl.sqrt_rn(tl.sum(h * h, 0) / size + eps)) * w
    tl.store(places, y.to(x.dtype.element_ty), mask=real)


def norm_projections(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """Norm q and k in place.

    Args:
        qkv: Float [T, Q + K + V], contiguous: q, k and v of each token side by side.
        q_norm: Float [Q], the weight of the norm of q.
        k_norm: Float [K], the weight of the norm of k.
        eps: Added to the mean squares.

    Returns:
        `qkv`.

    Raises:
        ValueError: a shape does not fit.
    """
    sizes = len(q_norm), len(k_norm)
    require(
        qkv.dim() == 2 and qkv.is_contiguous() and sum(sizes) <= qkv.shape[1],
        f"qkv is {tuple(qkv.shape)}; needed is contiguous [T, {sum(sizes)} and more]",
    )
    if len(qkv):
        width = triton.next_power_of_2(max(sizes))
        norm_projections_kernel[(len(qkv), 2)](
            qkv, q_norm, k_norm, eps, qkv.shape[1], *sizes, WIDTH=width,
            num_warps=min(32, max(4, width // 512)), enable_fp_fusion=False,
            **overlap(len(qkv) <= EARLY_ROWS),
        )  # fmt: skip
    return qkv


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
