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

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import Activation, Clamped
from kernels.triton.common import (
    EARLY_ROWS,
    absmax_scale,
    overlap,
    quantize,
    require,
    storage,
    wait_and_announce,
)

LARGEST_ROW = 65536  # beyond half of it registers spill a little
FEW_ROWS, PART = 64, 1024  # a row's program is the whole launch where rows are few: they are cut
GROUP = 128
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
TYPES = (*QUANTIZED, torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def store_row(
    y, row, first, i, real, out, scales, scale, experts, fault, pitch, SIZE,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store y, a row or the part of one from `first` on, quantized if `out` is, and its scales
    unless there is one for all. With `experts` there is a `scale` for each. `fault`, 0, or NaN
    where a row is not finite, goes into its scales: no integer is NaN, and maxima pass it over."""
    STORED: tl.constexpr = out.dtype.element_ty
    TYPE: tl.constexpr = tl.float8e4nv if BITS else STORED
    place = out + row * SIZE + i
    if STORED.primitive_bitwidth > 8:
        tl.store(place, y.to(STORED), mask=real)
    elif STATIC:
        own = tl.load(scale if experts is None else scale + tl.load(experts + row))
        if experts is not None:
            tl.store(scales + row, own)
        tl.store(place, quantize(y, own, TYPE, BITS), mask=real)
    elif GROUP:
        runs: tl.constexpr = y.numel // GROUP
        run = first // GROUP + tl.arange(0, runs)
        wide = tl.reshape(tl.where(real, y, 0.0), [runs, GROUP])
        own = absmax_scale(tl.max(tl.abs(wide), 1), TYPE)
        told = own if fault is None else own + fault
        tl.store(scales + run * pitch + row, told, mask=run * GROUP < SIZE)
        q = tl.reshape(quantize(wide, own[:, None], TYPE, BITS), [runs * GROUP])
        tl.store(place, q, mask=real)
    else:
        own = absmax_scale(tl.max(tl.abs(tl.where(real, y, 0.0)), 0), TYPE)
        tl.store(scales + row, own if fault is None else own + fault)
        tl.store(place, quantize(y, own, TYPE, BITS), mask=real)


def outputs_of(
    x: Tensor,
    size: int,
    scale: Tensor | None,
    dtype: torch.dtype,
    group: int | None,
    experts: Tensor | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Empty (rows, scales); one scale for all is given back as it is, none for float rows. Rows of
    `size` are to be stored with zeros after them, `length` elements in all."""
    require(x.dim() == 2 and x.is_contiguous(), f"x is {tuple(x.shape)}; needed is contiguous 2-D")
    require(dtype in TYPES, f"rows are asked for in {dtype}; supported are {TYPES}")
    require(scale is None or dtype in QUANTIZED, f"{dtype} rows take no scale")
    require(0 < size <= LARGEST_ROW, f"rows of {size}; the longest are of {LARGEST_ROW}")
    require(length is None or length >= size, f"rows of {size} do not fit in {length} elements")
    require(
        scale is None or (experts is not None or scale.numel() == 1),
        "a static scale is one element",
    )
    require(experts is None or scale is not None, "experts are named for their scales")
    grouped = dtype in QUANTIZED and scale is None
    require(
        group is None or (group == GROUP and grouped),
        f"group is {group}; rows of {QUANTIZED} without a given scale may have groups of {GROUP}",
    )
    rows, runs = x.shape[0] if experts is None else len(experts), triton.cdiv(size, group or size)
    if grouped or experts is not None:
        scale = torch.empty((runs, rows), dtype=torch.float32, device=x.device).t()
    return torch.empty((rows, length or size), dtype=dtype, device=x.device), scale


def launch_shape(
    size: int, static: bool, group: int | None, out: Tensor | None, rows: int, part: int = 0
) -> dict:
    """Arguments by name that all kernels take; `part` is the width of a part of a row, or 0."""
    width = part or max(triton.next_power_of_2(size), group or 1)
    return {
        "WIDTH": width,
        "STATIC": static,
        "GROUP": group or 0,
        "BITS": out is not None and storage(out) is not out,
        "num_warps": min(32, max(4, width // 512)),
        "enable_fp_fusion": False,
        **overlap(rows <= EARLY_ROWS),
    }


def part_of(rows: int, static: bool, group: int | None, out: Tensor) -> int:
    """The width of a program's part of a row: few rows are cut, where no scale is the whole's."""
    whole = out.dtype in QUANTIZED and not static and group is None
    return 0 if whole or rows > FEW_ROWS else PART


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
