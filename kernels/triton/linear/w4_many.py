"""Linear layers of 4-bit weights on a GPU, few rows or many: which kernel runs, and with what tile.

On sm_90 more than some tens of rows go to `kernels.triton.linear.hopper.w4`, if groups are 128
inputs long and there are no zero points, or scales have two levels; all else to
`kernels.triton.linear.w4a16` and `kernels.triton.linear.w4a8`. The device's table says which is
faster, under "w4a16_many", "w4a8_many" and "w4a8_two_level_many"; else a rule does.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.common import Workspace, is_sm_90, require
from kernels.triton.experts.sorting import SortedRows
from kernels.triton.linear import w4a8, w4a16
from kernels.triton.linear.hopper.w4 import w4_kernel
from kernels.triton.linear.packed import BLOCK, GroupedWeight, check_input_scale, check_inputs
from kernels.triton.tuning import Tile, measured_tile, multiprocessors

FLOATS = (torch.float16, torch.bfloat16)
THREADS = 384  # of a program: two warpgroups multiply, and one warp of a third loads


def w4a16_linear(
    x: Tensor,
    weight: w4a16.W4A16Weight,
    workspace: Workspace,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """As `linear.w4a16.w4a16_linear`; the two differ by the rounding of fp32 sums."""
    dtype = out_dtype or x.dtype
    tile = tile or _tile("w4a16", x, weight, dtype, sorted_rows)
    if tile is None or not tile.persistent:
        return w4a16.w4a16_linear(x, weight, workspace, tile, out_dtype, sorted_rows)
    check_inputs(x, FLOATS, weight.inputs)
    return _launch(x, None, weight, workspace, dtype, tile)


def w4a8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: w4a8.W4A8Weight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """As `linear.w4a8.w4a8_linear`, bit for bit but for the order of groups in a sum."""
    tile = tile or _tile(weight.family, xq, weight, out_dtype, sorted_rows)
    if tile is None or not tile.persistent:
        return w4a8.w4a8_linear(xq, x_scale, weight, workspace, out_dtype, tile, sorted_rows)
    check_inputs(xq, (torch.int8,), weight.inputs)
    check_input_scale(x_scale, len(xq))
    return _launch(xq, x_scale, weight, workspace, out_dtype, tile)


def _takes(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel for many rows can have this weight and give results of this type."""
    unit, _, _ = _levels(weight)
    fits = weight.group == BLOCK or unit is not None
    return fits and not weight.zero_points and dtype in FLOATS


def _levels(weight: GroupedWeight) -> tuple[Tensor | None, Tensor, int]:
    """(unit, what is loaded beside a tile, how many of that an output has).

    Of whole rows, which have none, the second is not read.
    """
    if not isinstance(weight, w4a8.W4A8Weight) or weight.unit is None:
        return None, weight.scale, 1
    loaded = weight.scale if weight.multipliers else weight.unit
    return weight.unit, loaded.view(torch.int8), weight.multipliers


def _tile(
    family: str,
    x: Tensor,
    weight: GroupedWeight,
    dtype: torch.dtype,
    sorted_rows: SortedRows | None,
) -> Tile | None:
    """The tile of the kernel for many rows; None where the other is to choose for itself."""
    if sorted_rows is not None or not _takes(weight, dtype):
        return None
    return many_rows_tile(family, x.device, len(x), weight.outputs, weight.inputs)


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
    floats = family == "w4a16"
    if rows <= (32 if floats else 64) or outputs % 128:
        return None
    large = outputs % 256 == 0
    if family == "w4a8_two_level":
        return _exact_rule(processors, rows, outputs)
    if rows <= 64:
        fills = large and outputs // 256 >= 0.8 * processors
        return Tile(256 if fills else 128, 64, 1 if fills else 4, 6, 8, True)
    if floats and rows > 1024:  # stages of 64 inputs
        return Tile(128, 256, 1, 6, 8, True)
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
    """Programs, and the last two of `kernels.triton.linear.hopper.runs`'s sizes: what is cut, and a
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


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    weight: GroupedWeight,
    workspace: Workspace,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """Run the kernel for many rows; ValueError where it does not fit."""
    (rows, inputs), outputs, integers = x.shape, weight.outputs, x.dtype == torch.int8
    require(
        _takes(weight, dtype),
        f"groups of {weight.group} inputs, zero points: {weight.zero_points}, results in {dtype}; "
        f"{tile} is for groups of {BLOCK} or scales of two levels, without zero points, and for "
        "results of 16 bits",
    )
    require(
        tile.outputs % 128 == 0 and outputs % tile.outputs == 0,
        f"{tile} for {outputs} outputs; needed are 128 or 256 outputs, and a divisor",
    )
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    groups, row_tiles = inputs // BLOCK, -(-rows // tile.rows)
    tiles = row_tiles * (outputs // tile.outputs)
    programs, cut, share = division(tiles, groups, multiprocessors(x.device), tile.splits)
    if cut:
        workspace.check(2 * programs * tile.outputs * tile.rows, 2 * (cut // groups))
    words = weight.packed.view(-1, 128 if integers else 32)  # 32 rows are 64 outputs of a group
    unit, scale, each = _levels(weight)
    exact = unit is not None
    parts = workspace.parts.view(torch.int32) if exact else workspace.parts
    w4_kernel[(programs,)](
        describe(x, [tile.rows, 128 // x.itemsize]),
        describe(words, [tile.outputs // 2, words.shape[1]]),
        describe(scale.view(-1), [tile.outputs * max(1, each)]),
        describe(out, [min(tile.rows, 64) if integers else 32, 64]),
        x_scale, unit, weight.bias, parts, workspace.arrivals,
        rows, outputs, tiles, groups, row_tiles, cut, share, STAGES=tile.stages,
        EXACT=exact, GROUPS=each, PLACES=1 if integers or tile.rows > 128 else 2,
        enable_fp_fusion=not exact,
        PER_ROW=int(x_scale is not None and x_scale.numel() > 1), BIAS=weight.bias is not None,
        num_warps=4, maxnreg=65536 // THREADS // 8 * 8,
    )  # fmt: skip
    return out


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A tensor for the TMA unit, in blocks; rows of 128 bytes are swizzled."""
    layout = gl.NVMMASharedLayout(128 if len(block) > 1 else 0, 8 * tensor.itemsize, len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)
