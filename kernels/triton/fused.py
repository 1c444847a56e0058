"""What stands between two GEMMs, in one pass over a row that ends in its quantization.

    add_rms_norm    h = x + residual;  y = h / sqrt(mean(h^2) + eps) * weight
    gated_product   y = activation(gate) * up
    quantize_rows   y = x

Of families that norm what a layer adds, x is normed before it is added, in the same pass; where the
next layer's input is not normed, y = h.

Rows may be stored longer than they are, with zeros after them, as layers read them whose inputs do
not fill tiles (`length`): that takes no pass of its own.

A program holds a row in registers, so that memory is read and written once: these are bound by the
bytes of their arguments. In between nothing is rounded: y is fp32. Rows are quantized as
`kernels.numerics` does, with a true division: by absmax / 127 (int8) or / 448 (e4m3) of the row, of
each run of 128 of it (`group`), by one calibrated scale, or by that of the row's expert. Asked for
a float type they give y, rounded to it. Scales of runs lie by run, as GEMMs of many rows read them:
a view with strides (1, rows). Devices before Ada have no e4m3; its bits are made there by integer
arithmetic.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import Activation, Clamped
from kernels.triton.common import require, storage, wait_and_announce
from kernels.triton.rows import launch_shape, outputs_of, part_of, store_row


@triton.jit
def root_mean_square(h, eps, SIZE):
    """Of a row with zeros after its SIZE elements."""
    return tl.sqrt_rn(tl.sum(h * h, 0) / SIZE + eps)


@triton.jit
def added(h, own, before, eps, SIZE, TYPE: tl.constexpr):
    """A row h, normed first if there is a weight of its `own`, added to what was `before`."""
    if own is not None:
        h = h * (1.0 / root_mean_square(h, eps, SIZE)) * own
    if before is not None:
        h += before.to(tl.float32)
    return h.to(TYPE)


@triton.jit
def normed(h, w, eps, SIZE):
    """(h normed, or as it is where there is no weight w; 0, or NaN where h is not finite)."""
    norm = root_mean_square(h, eps, SIZE)
    y = h
    if w is not None:
        y = h * (1.0 / norm) * w
    return y, 0.0 * norm


@triton.jit(do_not_specialize=["pitch"])
def add_rms_norm_kernel(
    x, residual, after, weight, total, out, scales, scale, experts, eps, pitch, SIZE, LENGTH,
    WIDTH: tl.constexpr, ADD: tl.constexpr, STATIC: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, OVERLAP: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """One row a program; WIDTH is LENGTH, that of rows as stored, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    real = i < SIZE
    w, own, before = None, None, None
    if weight is not None:
        w = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    if after is not None:
        own = tl.load(after + i, mask=real, other=0.0).to(tl.float32)
    if ADD and READY:
        before = tl.load(residual + row * SIZE + i, mask=real, other=0.0)
    wait_and_announce(OVERLAP)
    h = tl.load(x + row * SIZE + i, mask=real, other=0.0).to(tl.float32)
    if ADD:
        if not READY:
            before = tl.load(residual + row * SIZE + i, mask=real, other=0.0)
        rounded = added(h, own, before, eps, SIZE, total.dtype.element_ty)
        tl.store(total + row * SIZE + i, rounded, mask=real)
        h = rounded.to(tl.float32)
    if out is not None:
        y, fault = normed(h, w, eps, SIZE)
        store_row(
            y, row, 0, i, i < LENGTH, out, scales, scale, experts, fault, pitch, LENGTH, STATIC,
            GROUP, BITS,
        )  # fmt: skip


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x s(x): s the sigmoid, or the normal distribution, exactly or by a tanh, 2 s - 1."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    return y


@triton.jit(do_not_specialize=["pitch"])
def gated_product_kernel(
    gate_up, out, scales, scale, experts, pitch, SIZE, LENGTH, WIDTH: tl.constexpr,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, BOUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, part of WIDTH elements); SLOPE and BOUND are those of "clamped"."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH
    i = first + tl.arange(0, WIDTH)
    real = i < SIZE
    wait_and_announce(OVERLAP)
    gate = tl.load(gate_up + row * (2 * SIZE) + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + i, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, BOUND)
        up = tl.minimum(tl.maximum(up, -BOUND), BOUND) + 1.0
        y = gate / (1.0 + tl.exp(-SLOPE * gate)) * up
    else:
        y = activate(gate, ACTIVATION) * up
    store_row(
        y, row, first, i, i < LENGTH, out, scales, scale, experts, None, pitch, LENGTH, STATIC,
        GROUP, BITS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pitch"])
def quantize_rows_kernel(
    x, out, scales, scale, experts, pitch, SIZE, LENGTH, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, part of WIDTH elements)."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH
    i = first + tl.arange(0, WIDTH)
    real = i < SIZE
    wait_and_announce(OVERLAP)
    y = tl.load(x + row // SHARE * SIZE + i, mask=real, other=0.0).to(tl.float32)
    store_row(
        y, row, first, i, i < LENGTH, out, scales, scale, experts, None, pitch, LENGTH, STATIC,
        GROUP, BITS,
    )  # fmt: skip


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    residual_ready: bool = False,
    after: Tensor | None = None,
    experts: Tensor | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Norm of x + residual, or of after(x) + residual.

    Args:
        x: Float [T, H], contiguous.
        residual: Like `x`, or None where nothing is added.
        weight: Float [H], or None where the sum is not normed.
        eps: Added to the mean square.
        scale: fp32, one element, or None for a scale a row (or none, in a float type).
        dtype: Of the rows: int8, float8_e4m3fn or a float type.
        group: 128 for a scale each run of so many, None for a scale a row.
        residual_ready: Whether it was there before the kernel ahead of this started: it is then
            read while that runs.
        after: Float [H], the weight of the norm of x before it is added; None where x is added as
            it is.
        experts: int32 [T], whose element of `scale` is a row's; None where it has one.
        length: Of a row with zeros after it, where that is more than H.

    Returns:
        (rows [T, H or length] in `dtype`, scales fp32 [T, 1] or [T, ceil(H / 128)], `scale` or
        None, the sum like `x`); the rows are the sum where they are to be what it is.

    Raises:
        ValueError: a shape or type does not fit.
    """
    size = x.shape[-1]
    out, scales = outputs_of(x, size, scale, dtype, group, experts, length)
    for own in (weight, after):
        require(
            own is None or own.shape == (size,),
            f"norm weight is {own is not None and tuple(own.shape)}; needed is ({size},)",
        )
    require(after is None or residual is not None, "what is normed first is added to something")
    fits = residual is None or (residual.shape == x.shape and residual.is_contiguous())
    require(fits, "the residual must be contiguous and of the shape of x")
    total, rows = x if residual is None else torch.empty_like(x), x.shape[0]
    summed = weight is None and out.dtype == x.dtype and out.shape == x.shape  # rows are the sum
    if rows and not (summed and residual is None):
        add_rms_norm_kernel[(rows,)](
            x, residual, after, weight, total, None if summed else storage(out), scales, scale,
            experts, eps, rows, size, out.shape[1], ADD=residual is not None, READY=residual_ready,
            **launch_shape(out.shape[1], scale is not None, group, None if summed else out, rows),
        )  # fmt: skip
    return total if summed else out, scales, total


def gated_product(
    gate_up: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    experts: Tensor | None = None,
    activation: Activation = "silu",
    length: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The product of a gated feed-forward layer: activation(gate) * up.

    Args:
        gate_up: Float [T, 2 I], the gate's half first, contiguous.
        scale: fp32, one element, or None for a scale a row (or none, in a float type).
        dtype: Of the rows: int8, float8_e4m3fn or a float type.
        group: 128 for a scale each run of so many, None for a scale a row.
        experts: int32 [T], whose element of `scale` is a row's; None where it has one.
        activation: Of the gate, or of both.
        length: Of a row with zeros after it, where that is more than I.

    Returns:
        (rows [T, I or length] in `dtype`, scales fp32 [T, 1] or [T, ceil(I / 128)], `scale` or
        None).

    Raises:
        ValueError: a shape or type does not fit.
    """
    require(gate_up.shape[-1] % 2 == 0, f"gate_up has {gate_up.shape[-1]} columns, an odd number")
    size = gate_up.shape[-1] // 2
    out, scales = outputs_of(gate_up, size, scale, dtype, group, experts, length)
    rows, static = gate_up.shape[0], scale is not None
    if rows:
        part, clamped = part_of(rows, static, group, out), isinstance(activation, Clamped)
        whole = out.shape[1]
        gated_product_kernel[(rows, triton.cdiv(whole, part or whole))](
            gate_up, storage(out), scales, scale, experts, rows, size, whole,
            ACTIVATION="clamped" if clamped else activation,
            SLOPE=activation.slope if clamped else 0.0, BOUND=activation.bound if clamped else 0.0,
            **launch_shape(whole, static, group, out, rows, part),
        )  # fmt: skip
    return out, scales


def quantize_rows(
    x: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
    group: int | None = None,
    experts: Tensor | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows as a quantized linear layer takes them.

    Args:
        x: Float [T, K], contiguous.
        scale: fp32, one element, or None for a scale a row (or none, in a float type).
        dtype: Of the rows: int8, float8_e4m3fn or a float type.
        group: 128 for a scale each run of so many, None for a scale a row.
        experts: int32 [P], whose element of `scale` is a row's, where each of T rows is wanted
            P / T times, by one after the other; None where `scale` has one.
        length: Of a row with zeros after it, where that is more than K.

    Returns:
        (rows [T, K or length] in `dtype`, scales fp32 [T, 1] or [T, ceil(K / 128)], `scale` or
        None); P for T where there are experts.

    Raises:
        ValueError: a shape or type does not fit.
    """
    out, scales = outputs_of(x, x.shape[1], scale, dtype, group, experts, length)
    rows, whole = out.shape
    if rows:
        static = scale is not None
        part = part_of(rows, static, group, out)
        quantize_rows_kernel[(rows, triton.cdiv(whole, part or whole))](
            x, storage(out), scales, scale, experts, rows, x.shape[1], whole, SHARE=rows // len(x),
            **launch_shape(whole, static, group, out, rows, part),
        )  # fmt: skip
    return out, scales
