"""Blocks of columns solved one after the other, by GPTQ and by coordinate descent, in one launch.

A column waits for all before it, but the rows of a weight do not know of each other. So a program
holds a few rows of a block in registers and goes through its columns; what is left to torch is the
product that carries a block's errors to the columns after it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.numerics import QuantizedType
from kernels.triton.common import require, round_half_even

WIDEST = 128  # columns of a block: what registers hold
ROWS = 32  # of a program
FLOATS = {"fp8_e4m3": (3, -6), "fp4_e2m1": (1, 0)}  # bits of the mantissa, least exponent


@triton.jit
def nearest(
    ratio, zero, LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr
):
    """The value of a type next to `ratio`, with a zero point where integers have one.

    A MANTISSA below 0 is an integer type; else a float's numbers lie 2^-MANTISSA of their power of
    two apart, or of 2^LEAST below it.
    """
    if MANTISSA < 0:
        return tl.minimum(tl.maximum(round_half_even(ratio) + zero, LOW), HIGH)
    near = tl.minimum(tl.maximum(ratio, LOW), HIGH)
    exponent = tl.maximum((near.to(tl.int32, bitcast=True) >> 23) & 255, 127 + LEAST)
    step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    return round_half_even(near * inverse) * step


@triton.jit
def _gptq_kernel(
    columns, scales, zeros, factor, errors, count, size,
    LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    ZEROS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, COLUMNS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = n < size
    place = columns + i[:, None] * size + n
    w = tl.load(place, mask=(i[:, None] < count) & real, other=0.0)
    for j in range(count):
        column = tl.sum(tl.where(i[:, None] == j, w, 0.0), axis=0)
        scale = tl.load(scales + j * size + n, mask=real, other=1.0)
        zero = tl.zeros_like(scale)
        if ZEROS:
            zero = tl.load(zeros + j * size + n, mask=real, other=0.0)
        q = nearest(tl.div_rn(column, scale), zero, LOW, HIGH, MANTISSA, LEAST)
        row = tl.load(factor + j * count + i, mask=(i >= j) & (i < count), other=0.0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), axis=0)
        error = tl.div_rn(column - (q - zero) * scale, pivot + tl.zeros_like(scale))
        tl.store(columns + j * size + n, q, mask=real)
        tl.store(errors + j * size + n, error, mask=real)
        w -= tl.where(i > j, row, 0.0)[:, None] * error[None, :]


@triton.jit
def _descent_kernel(
    columns, values, scales, zeros, gradient, hessian, moves, count, size,
    LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    ZEROS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, COLUMNS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = n < size
    g = tl.load(gradient + i[:, None] * size + n, mask=(i[:, None] < count) & real, other=0.0)
    for j in range(count):
        slope = tl.sum(tl.where(i[:, None] == j, g, 0.0), axis=0)
        value = tl.load(values + j * size + n, mask=real, other=0.0)
        scale = tl.load(scales + j * size + n, mask=real, other=1.0)
        zero = tl.zeros_like(scale)
        if ZEROS:
            zero = tl.load(zeros + j * size + n, mask=real, other=0.0)
        row = tl.load(hessian + j * count + i, mask=(i >= j) & (i < count), other=0.0)
        curvature = tl.sum(tl.where(i == j, row, 0.0), axis=0)
        target = value + tl.div_rn(slope, curvature + tl.zeros_like(slope))
        q = nearest(tl.div_rn(target, scale), zero, LOW, HIGH, MANTISSA, LEAST)
        move = (q - zero) * scale - value
        tl.store(columns + j * size + n, q, mask=real)
        tl.store(moves + j * size + n, move, mask=real)
        g -= tl.where(i > j, row, 0.0)[:, None] * move[None, :]


def knows(kind: QuantizedType) -> bool:
    """Whether the kernels round to a type."""
    return kind.name in FLOATS or kind.storage == torch.int8


def gptq_block(
    columns: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, kind: QuantizedType
) -> Tensor:
    """Solve a block of columns by GPTQ.

    Args:
        columns: fp32 [B, N], B up to `WIDEST`; becomes the values of the type.
        scales: fp32 [B, N].
        zeros: fp32 [B, N], or None.
        factor: fp32 [B, B], upper triangular.
        kind: The type, one that `knows`.

    Returns:
        (w - q) / U_jj of each column, fp32 [B, N].
    """
    errors = torch.empty_like(columns)
    _launch(_gptq_kernel, (columns, scales, zeros), (factor, errors), kind)
    return errors


def descent_block(
    columns: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    gradient: Tensor,
    hessian: Tensor,
    kind: QuantizedType,
) -> Tensor:
    """Take a block of columns once more by coordinate descent.

    Args:
        columns: fp32 [B, N], B up to `WIDEST`; gets the new values of the type.
        values: fp32 [B, N], what the former ones stand for.
        scales: fp32 [B, N].
        zeros: fp32 [B, N], or None.
        gradient: fp32 [B, N].
        hessian: fp32 [B, B].
        kind: The type, one that `knows`.

    Returns:
        What each column has moved by, fp32 [B, N].
    """
    moves = torch.empty_like(columns)
    _launch(_descent_kernel, (columns, values, scales, zeros), (gradient, hessian, moves), kind)
    return moves


def _launch(
    kernel: triton.JITFunction,
    first: tuple[Tensor | None, ...],
    rest: tuple[Tensor, ...],
    kind: QuantizedType,
) -> None:
    """Launch on [B, N] tensors; `rest` holds one matrix [B, B], the last but one."""
    columns, zeros, matrix = first[0], first[-1], rest[-2].contiguous()
    assert columns is not None
    count, size = columns.shape
    rest = (*rest[:-2], matrix, rest[-1])
    require(count <= WIDEST, f"a block has {count} columns; at most {WIDEST} are solved at once")
    whole = all(t is None or t.is_contiguous() for t in (*first, *rest))
    require(whole, "blocks of columns must be contiguous")
    mantissa, least = FLOATS.get(kind.name, (-1, 0))
    kernel[(triton.cdiv(size, ROWS),)](
        *(columns if t is None else t for t in first),
        *rest,
        count,
        size,
        LOW=float(kind.q_min),
        HIGH=float(kind.q_max),
        MANTISSA=mantissa,
        LEAST=least,
        ZEROS=zeros is not None,
        COLUMNS=max(16, triton.next_power_of_2(count)),
        ROWS=ROWS,
        num_warps=4,
    )
