"""8-bit weights times many rows on Hopper: with what tile, and how the kernel is launched.

Gluon is imported by the launch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton.common import overlap, require
from kernels.triton.linear.hopper.descriptors import THREADS, describe
from kernels.triton.linear.launch import Product
from kernels.triton.linear.packing import BLOCK
from kernels.triton.tuning import Tile, multiprocessors

FAST_INPUTS = 8192  # the tensor cores' own sums of more are off by a good part of e4m3's rounding
SEGMENT = 16  # runs of 128 inputs whose sum stays in the tensor cores, where there are more
LONG = 128 * 128  # results of a tile for which registers hold two sums
BAND_ROWS = 4096  # whose tiles follow each other, so that weights and x stay in L2
MANY = tuple(
    Tile(*sizes, 8, True)
    for sizes in ((256, 128, 1, 4), (128, 256, 1, 4), (128, 128, 1, 6), (128, 64, 1, 8))
)  # tiles of many rows: as deep a ring as fits in shared memory


def many_rows_rule(processors: int, rows: int, outputs: int, long: bool = False) -> Tile | None:
    """The tile of the shortest time, if a round of tiles takes as long as a tile has results.

    What a tile costs beyond that is worth some 4096 results, as measured on an H100. `long` sums of
    fp8 need registers of their own. None for few rows.
    """

    def rounds(tile: Tile) -> int:
        tiles = -(-rows // tile.rows) * -(-outputs // tile.outputs)
        return -(-tiles // processors) * (tile.rows * tile.outputs + 4096)

    fitting = many_rows_tiles(outputs, long)
    return min(fitting, key=rounds) if rows > 64 and fitting else None


def many_rows_tiles(outputs: int, long: bool) -> list[Tile]:
    """The tiles of many rows that fit; see `many_rows_rule`."""
    most = LONG if long else 2 * LONG
    return [t for t in MANY if _fits(outputs, t) and t.rows * t.outputs <= most]


def _fits(outputs: int, tile: Tile) -> bool:
    """Whether outputs are whole tiles, or 64 less."""
    return outputs % 64 == 0 and outputs % tile.outputs in (0, tile.outputs - 64)


def launch_w8(
    packed: Tensor, scale: Tensor, bias: Tensor | None, product: Product, tile: Tile
) -> None:
    """Run the kernel for many rows on a weight as `W8A8Weight` has it.

    Raises:
        ValueError: the tile does not fit.
    """
    from kernels.triton.linear.hopper.w8 import w8a8_many_kernel

    x, out = product.x, product.out
    rows, outputs, inputs = len(x), out.shape[1], packed.numel() // out.shape[1]
    require(
        _fits(outputs, tile) and tile.outputs % 128 == 0 and tile.splits == 1,
        f"{tile} for {outputs} outputs; needed are 128 or 256 outputs, of which whole tiles, or 64 "
        "less, make them all, and no splits",
    )
    long = x.dtype != torch.int8 and inputs > FAST_INPUTS
    require(
        not long or tile.rows * tile.outputs <= LONG,
        f"{tile} for {inputs} inputs; of more than {FAST_INPUTS} a tile has {LONG} results at most",
    )
    groups, row_tiles = inputs // BLOCK, -(-rows // tile.rows)
    tiles = row_tiles * -(-outputs // tile.outputs)
    programs = min(multiprocessors(x.device), tiles)
    w8a8_many_kernel[(programs,)](
        describe(x, [tile.rows, BLOCK]),
        describe(packed.view(-1, packed.shape[-1]), [tile.outputs, BLOCK]),
        describe(out, [min(128 // out.itemsize, tile.rows), 64]),
        product.x_scale, scale, bias, rows, outputs, tiles, groups, row_tiles,
        BAND=BAND_ROWS // tile.rows, STAGES=tile.stages, SEGMENT=SEGMENT if long else 0,
        PER_ROW=product.per_row, BIAS=bias is not None, enable_fp_fusion=False,
        num_warps=4, maxnreg=65536 // THREADS // 8 * 8, **overlap(early=False),
    )  # fmt: skip
