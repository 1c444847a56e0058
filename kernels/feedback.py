"""Rounding of a weight's elements one after the other; those to come make up for each one's error.

The elements of a weight W [N, K] are taken in tiles: column by column of a tile, and from the first
row to the last in each. With a factor for rows R [N, N], one for columns C [K, K] and
p = R_ii C_jj, an element (i, j) that has its turn gets an e, and all later (l, k) hear of it:

    x_lk -= R_il e C_jk

    `round_all`   R and C upper triangular, x = W at first:   e = (x_ij - q_ij s_ij) / p,
                  q_ij the value of the grid next to x_ij / s_ij
    `move_all`    R and C symmetric, v = q s known:           e = v' - v_ij,
                  v' the multiple of s_ij next to v_ij + x_ij / p

In which tiles that happens makes no difference to `round_all`. What a tile does to all beyond it is
two matrix products, so that only tiles are walked element by element: by compiled code
(`kernels.cpu`), or by plain torch, which says what is computed. Where R and C are triangular, tiles
on one anti-diagonal may go side by side, as on a GPU (`kernels.triton.calibration.feedback`).

Matrices are transposed here, [K, N]: the rows of one column are adjacent. A weight may have several
blocks of N rows that know nothing of each other: [blocks, K, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.structures import FeedbackTile, pointer
from kernels.numerics import QuantizedType

SIZE = 32  # rows and columns of a tile: on a GPU, the lanes of a warp


@dataclass(frozen=True)
class Grid:
    """The values that elements are rounded to, before they are scaled.

    Attributes:
        low: The smallest.
        high: The largest.
        mantissa: Stored bits of a float's mantissa; -1 for whole numbers.
        exponent: Of a float's smallest normal value, 2^exponent.
    """

    low: float
    high: float
    mantissa: int = -1
    exponent: int = 0

    @classmethod
    def of(cls, kind: QuantizedType) -> Grid:
        """That of a quantized type."""
        floats = {"fp8_e4m3": (3, -6), "fp4_e2m1": (1, 0)}
        return cls(kind.q_min, kind.q_max, *floats.get(kind.name, ()))

    def nearest(self, x: Tensor, zeros: Tensor | None = None) -> Tensor:
        """The values next to those of x, half to even; with a zero point for each, if any."""
        if zeros is not None:
            return (x.round() + zeros).clamp(self.low, self.high)
        x = x.clamp(self.low, self.high)
        if self.mantissa < 0:
            return x.round()
        _, power = torch.frexp(x)
        step = torch.exp2((power - 1).clamp(min=self.exponent) - self.mantissa)
        return (x / step).round() * step


@dataclass(frozen=True)
class Rounding:
    """Of what elements are multiples: fp32, all [blocks, K, N] and contiguous.

    Attributes:
        grid: The values they are multiples of.
        scale: Of each element.
        zeros: Zero point of each element; None where the type is symmetric.
    """

    grid: Grid
    scale: Tensor
    zeros: Tensor | None = None

    def values(self, q: Tensor) -> Tensor:
        """What q stands for, of the shape of q."""
        return (q if self.zeros is None else q - self.zeros) * self.scale

    def part(self, at: tuple[int, slice, slice]) -> Rounding:
        """Of some rows and columns of one block."""
        return Rounding(self.grid, self.scale[at], None if self.zeros is None else self.zeros[at])


def round_all(weight: Tensor, rounding: Rounding, rows: Tensor, columns: Tensor) -> Tensor:
    """Round blocks of a weight.

    Args:
        weight: fp32 [blocks, K, N], contiguous; spent.
        rounding: To what.
        rows: R of each block, upper triangular, fp32 [blocks, N, N].
        columns: C, upper triangular, fp32 [K, K].

    Returns:
        q fp32 [blocks, K, N]: values of the grid, with the zero point.
    """
    return walk(weight, None, rounding, rows, columns, Tile.walk, SIZE)


def move_all(
    gradient: Tensor, values: Tensor, rounding: Rounding, rows: Tensor, columns: Tensor
) -> Tensor:
    """Move each value of a rounded weight to where the error is least, given all the others.

    Args:
        gradient: x = C (W - Q)^T R, fp32 [blocks, K, N], contiguous; spent.
        values: Q^T, what the weight is rounded to, fp32 [blocks, K, N], contiguous; replaced.
        rounding: To what.
        rows: R of each block, symmetric, fp32 [blocks, N, N].
        columns: C, symmetric, fp32 [K, K].

    Returns:
        q fp32 [blocks, K, N]: values of the grid, with the zero point.
    """
    return walk(gradient, values, rounding, rows, columns, Tile.walk, SIZE)


def walk(
    x: Tensor,
    values: Tensor | None,
    rounding: Rounding,
    rows: Tensor,
    columns: Tensor,
    walk_tile: Callable[[Tile], None],
    size: int,
) -> Tensor:
    """Tile by tile: `move_all`, or `round_all` without `values`; arguments as there."""
    found, rows, columns = torch.empty_like(x), rows.contiguous(), columns.contiguous()
    for block in range(len(x)):
        own = rows[block]
        for columns_of in _spans(x.shape[1], size):
            errors = torch.zeros_like(x[block, columns_of])
            corner = columns[columns_of, columns_of]
            with nullcontext() if x.is_cuda else _one_thread():
                for rows_of in _spans(x.shape[2], size):
                    at = (block, columns_of, rows_of)
                    above = slice(0, rows_of.start)  # which have moved these columns already
                    if rows_of.start:
                        x[at] -= corner.T @ (errors[:, above] @ own[above, rows_of])
                    values_of = None if values is None else values[at]
                    part, blame = rounding.part(at), errors[:, rows_of]
                    factor = own[rows_of, rows_of]
                    walk_tile(Tile(x[at], values_of, part, factor, corner, found[at], blame))
            later = slice(columns_of.stop, None)
            x[block, later].addmm_(columns[columns_of, later].T, errors @ own, alpha=-1.0)
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """For products of a tile, which are too small to wait for other threads again and again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _spans(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


@dataclass(frozen=True)
class Tile:
    """At most `SIZE` columns and rows of a block; all but the factors are of one stride.

    Attributes:
        x: What is rounded, or the gradients of what is moved, fp32 [columns, rows]; spent.
        values: What is moved; None where x is rounded.
        rounding: To what.
        rows: R of these rows.
        columns: C of these columns.
        q: Gets what is found.
        errors: Gets e.
    """

    x: Tensor
    values: Tensor | None
    rounding: Rounding
    rows: Tensor
    columns: Tensor
    q: Tensor
    errors: Tensor

    def walk(self) -> None:
        """Find `q` and `errors`, and replace `values`."""
        if native.library() is None:
            self.walk_plainly()
            return
        r = self.rounding
        width, height = self.x.shape
        native.loaded().ptq_feedback(
            byref(
                FeedbackTile(
                    *map(pointer, (self.x, self.values, r.scale, r.zeros)),
                    *map(pointer, (self.rows, self.columns, self.q, self.errors)),
                    *(height, width, self.x.stride(0), self.rows.stride(0), self.columns.stride(0)),
                    *(r.grid.low, r.grid.high, r.grid.mantissa, r.grid.exponent),
                )
            )
        )

    def walk_plainly(self) -> None:
        """`walk` in plain torch."""
        r = self.rounding
        for j in range(len(self.x)):
            for i in range(self.x.shape[1]):
                pivot, zeros = self.rows[i, i] * self.columns[j, j], None
                if r.zeros is not None:
                    zeros = r.zeros[j, i]
                target = self.x[j, i].clone()
                if self.values is not None:
                    target = self.values[j, i] + target / pivot
                q = r.grid.nearest(target / r.scale[j, i], zeros)
                value = (q if zeros is None else q - zeros) * r.scale[j, i]
                error = (target - value) / pivot
                if self.values is not None:
                    error = value - self.values[j, i]
                    self.values[j, i] = value
                self.q[j, i], self.errors[j, i] = q, error
                self.x[j, i + 1 :] -= error * self.columns[j, j] * self.rows[i, i + 1 :]
            self.x[j + 1 :] -= torch.outer(self.columns[j, j + 1 :], self.errors[j] @ self.rows)
