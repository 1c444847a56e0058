"""Rows that end in their quantization: how programs store them, how their kernels are launched.

See `kernels.triton.fused`, whose ops all end so.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    EARLY_ROWS,
    absmax_scale,
    overlap,
    quantize,
    require,
    storage,
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
