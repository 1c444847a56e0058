"""Rounding with feedback on a GPU: tiles on one anti-diagonal side by side.

`kernels.feedback` says what is computed; its plain twin is what these kernels are tested against.
With both factors upper triangular, a tile (I rows, J columns) waits for those with no more of
either. So the tiles with I + J = d go together, in two launches: `_update` takes off what the tiles
before have done, two sums of products,

    x[J, I] -= sum_{M<J} C[M, J]^T P[M, I] + C[J, J]^T S[J, I]
    S[J, I]  = sum_{L<I} e[J, L] R[L, I]

with P[M, I] = S[M, I] + e[M, I] R[I, I], and `_walk`, of one warp a tile, takes its elements one
after the other; a lane is a row. Sums are fp32 and of one order: the same weights give the same
integers. Moving values knows no anti-diagonals; there `_walk` goes tile by tile.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.feedback import SIZE, Rounding, Tile, walk
from kernels.triton.calibration.columns import nearest


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
