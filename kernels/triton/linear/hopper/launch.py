"""Weights of 4 and 8 bits times many rows on Hopper: with what tiles, and how kernels are launched.

On sm_90 more than some tens of rows of 4-bit weights go to `kernels.triton.linear.hopper.w4`, if
groups are 128 inputs long and there are no zero points, or scales have two levels. The device's
table says when it is faster than the kernel for few rows, under "w4a16_many", "w4a8_many" and
"w4a8_two_level_many"; else a rule does. W8A8 goes to `kernels.triton.linear.hopper.w8`. Gluon is
imported by the launch alone.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.triton.common import is_sm_90, overlap, require
from kernels.triton.linear.launch import Product
from kernels.triton.linear.packing import BLOCK
from kernels.triton.linear.weight import GroupedWeight
from kernels.triton.tuning import Tile, measured_tile, multiprocessors

THREADS = 384  # of a program: two warpgroups multiply, and one warp of a third loads


def describe(tensor: Tensor, block: list[int]) -> Any:
    """A tensor for the TMA unit, in blocks; rows of 128 bytes are swizzled."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128 if len(block) > 1 else 0, 8 * tensor.itemsize, len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)


FLOATS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Levels:
    """Scales as the kernel takes them.

    Attributes:
        loaded: What is loaded beside a tile: scales, or int8 multipliers of two levels. Of whole
            rows, which have neither, it is not read.
        each: How many of these an output has in 128 inputs.
        unit: Of two levels and of fp4, fp32 [N]; None for others.
    """

    loaded: Tensor
    each: int = 1
    unit: Tensor | None = None


def takes(weight: GroupedWeight, levels: Levels, dtype: torch.dtype) -> bool:
    """Whether the kernel for many rows can have this weight and give results of this type."""
    fits = weight.group == BLOCK or levels.unit is not None
    gives = dtype in FLOATS or (dtype == torch.int32 and weight.exact)
    return fits and not weight.zero_points and gives


@cache
def many_rows_tile(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int
) -> Tile | None:
    """Measured, else by `rule`; None for few rows, and on devices other than sm_90."""
    if not is_sm_90(device):
        return None
    found = measured_tile(f"{family}_many", device, rows, outputs, inputs)
    return found or rule(family, multiprocessors(device), rows, outputs)


def rule(family: str, processors: int, rows: int, outputs: int) -> Tile | None:
    """Large tiles where they fill the SMs, else smaller ones that are cut; None for few rows."""
    floats = family.startswith("w4a16")
    if rows <= (32 if floats else 64) or outputs % 128:
        return None
    large = outputs % 256 == 0
    if family == "w4a8_two_level":
        return _exact_rule(processors, rows, outputs)
    if rows <= 64:
        fills = large and outputs // 256 >= 0.8 * processors
        return Tile(256 if fills else 128, 64, 1 if fills else 4, 6, 8, True)
    if floats and rows > 1024:  # stages of 64 inputs
        stages = 5 if family == "w4a16_nvfp4" else 6  # there is no room for its scales
        return Tile(128, 256, 1, stages, 8, True)
    if large and -(-rows // 128) * (outputs // 256) >= 0.8 * processors:
        return Tile(256, 128, 1, 4 if floats else 5, 8, True)
    return Tile(128, 128, 4, 4 if floats else 6, 8, True)


def _exact_rule(processors: int, rows: int, outputs: int) -> Tile:
    """Of two levels: many rows a tile, since its weights are unpacked once for all, if SMs fill."""
    fills = 0.8 * processors
    if rows > 128 and -(-rows // 256) * (outputs // 128) >= fills:
        if rows > 1024 and outputs % 256 == 0:
            return Tile(256, 128, 4, 5, 8, True)
        return Tile(128, 256, 1, 4, 8, True)
    tall = 128 if -(-rows // 128) * (outputs // 128) >= fills else 64
    tiles = -(-rows // tall) * (outputs // 128)
    return Tile(128, tall, 1 if tiles >= fills else 4, 6, 8, True)


def division(tiles: int, groups: int, processors: int, splits: int) -> tuple[int, int, int]:
    """Programs, and the last two of `kernels.triton.linear.hopper.w4`'s sizes: what is cut, and a
    share.

    With splits > 1 the tiles that are left after full rounds are cut, each into about that many
    parts at most.
    """
    programs = min(processors, tiles)
    if splits == 1 or tiles % processors == 0:
        return programs, 0, 1
    cut = tiles % processors * groups
    share = max(-(-cut // processors), -(-groups // splits))
    return max(programs, -(-cut // share)), cut, share


def launch_w4(weight: GroupedWeight, levels: Levels, product: Product, tile: Tile) -> None:
    """Run the kernel for many rows; ValueError where it does not fit."""
    from kernels.triton.linear.hopper.w4 import w4_kernel

    x, out, workspace = product.x, product.out, product.workspace
    rows, (outputs, inputs), integers = len(x), weight.size, x.dtype == torch.int8
    require(
        takes(weight, levels, out.dtype),
        f"groups of {weight.group} inputs, zero points: {weight.zero_points}, results in "
        f"{out.dtype}; {tile} is for groups of {BLOCK} or scales of two levels, without zero "
        "points, and for results of 16 bits, or int32 of two levels",
    )
    require(
        tile.outputs % 128 == 0 and outputs % tile.outputs == 0,
        f"{tile} for {outputs} outputs; needed are 128 or 256 outputs, and a divisor",
    )
    groups, row_tiles = inputs // BLOCK, -(-rows // tile.rows)
    tiles = row_tiles * (outputs // tile.outputs)
    programs, cut, share = division(tiles, groups, multiprocessors(x.device), tile.splits)
    if cut:
        workspace.check(2 * programs * tile.outputs * tile.rows, 2 * (cut // groups))
    words = weight.packed.view(-1, 128 if integers else 32)  # 32 rows are 64 outputs of a group
    exact, fp4 = integers and levels.unit is not None, not integers and levels.unit is not None
    parts = workspace.parts.view(torch.int32) if exact else workspace.parts
    w4_kernel[(programs,)](
        describe(x, [tile.rows, 128 // x.itemsize]),
        describe(words, [tile.outputs // 2, words.shape[1]]),
        describe(levels.loaded.view(-1), [tile.outputs * max(1, levels.each)]),
        describe(out, [min(tile.rows, 128 // out.itemsize) if integers else 32, 64]),
        product.x_scale, levels.unit, weight.bias, parts, workspace.arrivals,
        rows, outputs, tiles, groups, row_tiles, cut, share, STAGES=tile.stages,
        EXACT=exact, FP4=fp4, GROUPS=levels.each, PLACES=1 if integers or tile.rows > 128 else 2,
        enable_fp_fusion=not exact, PER_ROW=product.per_row, BIAS=weight.bias is not None,
        num_warps=4, maxnreg=65536 // THREADS // 8 * 8, **overlap(early=False),
    )  # fmt: skip


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
