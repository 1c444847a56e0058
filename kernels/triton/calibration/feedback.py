"""Rounding with feedback on a GPU: columns one after the other, or tiles on anti-diagonals.

With a factor of columns alone (GPTQ, and coordinate descent) a column waits for all before it, but
the rows of a weight do not know of each other. So a program holds a few rows of a block in
registers and goes through its columns; what is left to torch is the product that carries a block's
errors to the columns after it.

With factors of rows, too, `kernels.feedback` says what is computed; its plain twin is what these
kernels are tested against. Both factors are upper triangular, so that a tile (I rows, J columns)
waits for those with no more of either. The tiles with I + J = d go together, in two launches:
`_update` takes off what the tiles before have done, two sums of products,

    x[J, I] -= sum_{M<J} C[M, J]^T P[M, I] + C[J, J]^T S[J, I]
    S[J, I]  = sum_{L<I} e[J, L] R[L, I]

with P[M, I] = S[M, I] + e[M, I] R[I, I], and `_walk`, of one warp a tile, takes its elements one
after the other; a lane is a row. Sums are fp32 and of one order: the same weights give the same
integers. Moving values knows no anti-diagonals; there `_walk` goes tile by tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.feedback import SIZE, Rounding, Tile, walk
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


@triton.jit(do_not_specialize=["diagonal", "first"])
def _update(
    x, spread, errors, rows, columns, diagonal, first, WIDTH, HEIGHT, SIZE: tl.constexpr
):  # fmt: skip
    """Take off of the tiles on a diagonal what those before them have done; see above."""
    across = first + tl.program_id(0)
    down = diagonal - across
    block = tl.program_id(1).to(tl.int64)
    x += block * WIDTH * HEIGHT
    spread += block * WIDTH * HEIGHT
    errors += block * WIDTH * HEIGHT
    rows += block * HEIGHT * HEIGHT
    step = tl.arange(0, SIZE)
    j, i = across * SIZE + step, down * SIZE + step
    in_j, in_i = j < WIDTH, i < HEIGHT
    wide_j, _wide_i = j.to(tl.int64), i.to(tl.int64)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for m in range(across):
        k = m * SIZE + step
        c = tl.load(
            columns + k[None, :].to(tl.int64) * WIDTH + j[:, None], mask=in_j[:, None], other=0.0
        )
        p = tl.load(
            spread + k[:, None].to(tl.int64) * HEIGHT + i[None, :], mask=in_i[None, :], other=0.0
        )
        total += tl.dot(c, p, input_precision="ieee")
    above = tl.zeros([SIZE, SIZE], tl.float32)
    for n in range(down):
        over = n * SIZE + step
        e = tl.load(
            errors + wide_j[:, None] * HEIGHT + over[None, :], mask=in_j[:, None], other=0.0
        )
        r = tl.load(
            rows + over[:, None].to(tl.int64) * HEIGHT + i[None, :], mask=in_i[None, :], other=0.0
        )
        above += tl.dot(e, r, input_precision="ieee")
    real = in_j[:, None] & in_i[None, :]
    place = wide_j[:, None] * HEIGHT + i[None, :]
    tl.store(spread + place, above, mask=real)
    own = tl.load(
        columns + wide_j[None, :] * WIDTH + j[:, None],
        mask=in_j[None, :] & in_j[:, None],
        other=0.0,
    )  # C[J, J]^T
    total += tl.dot(own, above, input_precision="ieee")
    tl.store(x + place, tl.load(x + place, mask=real, other=0.0) - total, mask=real)


@triton.jit
def _round_column(
    column, now, s, z, own, pivot, rows, row_pitch, step, steps, real,
    LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    MOVE: tl.constexpr,
):  # fmt: skip
    """(integers, errors, what P gains) of a tile's column, its elements one after the other.

    `now` are values that are moved, s and z scales and zero points, `own` is C[j, j] and `pivot`
    its products with R[i, i]; the tile's `steps` rows of R are `row_pitch` apart.
    """
    found, blame, added = tl.zeros_like(s), tl.zeros_like(s), tl.zeros_like(s)
    factor = tl.load(rows, mask=real, other=0.0)
    for i in range(steps):
        factor_ahead = tl.load(rows + (i + 1) * row_pitch, mask=real & (i + 1 < steps), other=0.0)
        target = column
        if MOVE:
            target = now + tl.div_rn(column, pivot)
        near = nearest(tl.div_rn(target, s), z, LOW, HIGH, MANTISSA, LEAST)
        value = (near - z) * s
        error = value - now if MOVE else tl.div_rn(target - value, pivot)
        mine = step == i
        found = tl.where(mine, near, found)
        blame = tl.where(mine, error, blame)
        e = tl.sum(tl.where(mine, error, 0.0), 0)
        column -= e * own * factor
        added += e * factor
        factor = factor_ahead
    return found, blame, added


@triton.jit(do_not_specialize=["diagonal", "first"])
def _walk(
    x, values, scale, zeros, spread, rows, columns, q, errors, diagonal, first, width, height,
    block_pitch, pitch, row_block, row_pitch, column_pitch,
    LOW: tl.constexpr, HIGH: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    MOVE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Round the elements of a tile, or move them, one after the other."""
    across = first + tl.program_id(0)
    down = diagonal - across
    block = tl.program_id(1).to(tl.int64)
    step = tl.arange(0, SIZE)
    lane = down * SIZE + step
    real = lane < height
    corner = across.to(tl.int64) * SIZE
    at = block * block_pitch + corner * pitch + lane
    rows += block * row_block + down.to(tl.int64) * SIZE * row_pitch + lane
    columns += corner * column_pitch + corner
    count = tl.minimum(width - across * SIZE, SIZE)
    steps = tl.minimum(height - down * SIZE, SIZE)
    in_tile = (step[:, None] < count) & real[None, :]
    tile = tl.load(x + at[None, :] + step[:, None].to(tl.int64) * pitch, mask=in_tile, other=0.0)
    own_rows = tl.load(rows + step * row_pitch, mask=real, other=1.0)  # R[i, i]
    for j in range(count):
        column = tl.sum(tl.where(step[:, None] == j, tile, 0.0), 0)
        own = tl.load(columns + j * column_pitch + j)
        here = at + j * pitch
        s = tl.load(scale + here, mask=real, other=1.0)
        z = tl.zeros_like(s)
        if zeros is not None:
            z = tl.load(zeros + here, mask=real, other=0.0)
        now = tl.zeros_like(s)
        if MOVE:
            now = tl.load(values + here, mask=real, other=0.0)
        gone = tl.zeros_like(s)
        if not MOVE:
            gone = tl.load(spread + here, mask=real, other=0.0)
        found, blame, added = _round_column(
            column, now, s, z, own, own_rows * own, rows, row_pitch, step, steps, real,
            LOW, HIGH, MANTISSA, LEAST, MOVE,
        )  # fmt: skip
        tl.store(q + here, found, mask=real)
        tl.store(errors + here, blame, mask=real)
        if MOVE:
            tl.store(values + here, (found - z) * s, mask=real)
        else:
            tl.store(spread + here, gone + added, mask=real)
        later = tl.load(columns + j * column_pitch + step, mask=step < count, other=0.0)
        tile -= later[:, None] * added[None, :]


def round_all(weight: Tensor, rounding: Rounding, rows: Tensor, columns: Tensor) -> Tensor:
    """See `kernels.feedback.round_all`."""
    blocks, width, height = weight.shape
    found, errors, spread = (torch.empty_like(weight) for _ in range(3))
    rows, columns, grid = rows.contiguous(), columns.contiguous(), rounding.grid
    across, down = triton.cdiv(width, SIZE), triton.cdiv(height, SIZE)
    for diagonal in range(across + down - 1):
        first = max(0, diagonal - down + 1)
        tiles = min(across - 1, diagonal) - first + 1
        _update[tiles, blocks](
            weight, spread, errors, rows, columns, diagonal, first, width, height, SIZE=SIZE
        )
        _walk[tiles, blocks](
            weight, None, rounding.scale, rounding.zeros, spread, rows, columns, found, errors,
            diagonal, first, width, height, width * height, height, height * height, height, width,
            LOW=grid.low, HIGH=grid.high, MANTISSA=grid.mantissa, LEAST=grid.exponent,
            MOVE=False, SIZE=SIZE, num_warps=1,
        )  # fmt: skip
    return found


def move_all(
    gradient: Tensor, values: Tensor, rounding: Rounding, rows: Tensor, columns: Tensor
) -> Tensor:
    """See `kernels.feedback.move_all`."""
    return walk(gradient, values, rounding, rows, columns, _move, SIZE)


def _move(tile: Tile) -> None:
    r, (width, height) = tile.rounding, tile.x.shape
    _walk[1, 1](
        tile.x, tile.values, r.scale, r.zeros, None, tile.rows, tile.columns, tile.q, tile.errors,
        0, 0, width, height, 0, tile.x.stride(0), 0, tile.rows.stride(0), tile.columns.stride(0),
        LOW=r.grid.low, HIGH=r.grid.high, MANTISSA=r.grid.mantissa, LEAST=r.grid.exponent,
        MOVE=True, SIZE=SIZE, num_warps=1,
    )  # fmt: skip
