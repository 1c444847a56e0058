"""W8A8: int8 or fp8 weights and activations, one scale an output channel, one a row or tensor.

    y[m, n] = (sum_k xq[m, k] wq[n, k]) (sx[m] sw[n]) + b[n]

int8 sums are exact in int32 and the epilogue is unfused fp32, so that a result equals
`kernels.reference.int8_linear` bit for bit, however it is cut. fp8 (e4m3) sums leave the tensor
cores, which keep about 14 bits, for fp32 every 128 inputs; many rows' every `SEGMENT` runs of 128,
where there are more than `FAST_INPUTS`.

int8 weights lie [K / 128, N, 128]: at one step of the sum all programs read one contiguous stretch,
and the same array is a matrix of K / 128 * N rows for the TMA unit. fp8 weights stay [N, K], since
cuBLASLt, which takes calls of most rows, wants them so, and longer stretches of a row are read at a
step.

Two kernels. Up to some tens of rows, and on other devices than sm_90 always, the weight is the left
operand (wgmma wants 64 rows there, x has fewer), the sum is split where outputs are few. Beyond,
that of `kernels.triton.linear.hopper.w8`, one program an SM. Of fp8 more than `LIBRARY_ROWS` rows
go to cuBLASLt: 4096 took it 720 us on an H100 for 28672x4096, and the kernel 790.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    AHEAD,
    Workspace,
    announce,
    capability,
    is_sm_90,
    library_scales,
    overlap,
    prefetch,
    prefetch_lines,
    require,
    sum_splits,
    takes_wide_steps,
    wait,
)
from kernels.triton.experts.sorting import COUNTED, SortedRows, rows_of, rows_of_tile
from kernels.triton.linear.hopper.w8 import w8a8_many_kernel
from kernels.triton.linear.packed import (
    PackedWeight,
    check_input_scale,
    check_inputs,
    fits_tiles,
    grid_of,
    lay_bias,
)
from kernels.triton.linear.w4_many import THREADS, describe
from kernels.triton.tuning import Tile, measured_tile, multiprocessors, rule

BLOCK = 128  # inputs of a run
FAMILY = {torch.int8: "w8a8", torch.float8_e4m3fn: "fp8"}
LIBRARY_ROWS = 256  # of fp8: beyond these cuBLASLt is ahead on sm_90
FAST_INPUTS = 8192  # the tensor cores' own sums of more are off by a good part of e4m3's rounding
SEGMENT = 16  # runs of 128 inputs
LONG = 128 * 128  # results of a tile for which registers hold two sums
BAND_ROWS = 4096  # whose tiles follow each other, so that weights and x stay in L2
MANY = tuple(
    Tile(*sizes, 8, True)
    for sizes in ((256, 128, 1, 4), (128, 256, 1, 4), (128, 128, 1, 6), (128, 64, 1, 8))
)  # tiles of many rows: as deep a ring as fits in shared memory


class W8A8Weight(PackedWeight):
    """A weight packed for `w8a8_linear`: int8 [K / 128, N, 128] or e4m3 [N, K], `scale` fp32 [N].

    Both are contiguous: the kernels rely on it, and copies of a weight keep it.
    """

    @property
    def outputs(self) -> int:
        """N."""
        return len(self.scale)

    @property
    def inputs(self) -> int:
        """K."""
        return self.packed.numel() // self.outputs


def pack_w8a8(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> W8A8Weight:
    """Lay a quantized weight out for `w8a8_linear`, on the device it is on.

    Args:
        q: int8 or e4m3, [N, K]; N a multiple of 64, K of 128.
        scale: fp32 [N] or [N, 1].
        bias: Float [N] or None.

    Raises:
        ValueError: a shape or type is another.
    """
    require(
        fits_tiles(q) and q.dtype in FAMILY,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is int8 or float8_e4m3fn [N, K], N in 64s "
        f"and K in {BLOCK}s",
    )
    of_rows = q.shape[:-1]
    outputs = of_rows.numel()
    require(scale.numel() == outputs, f"{scale.numel()} scales for {outputs} outputs")
    packed = q.contiguous()
    if q.dtype == torch.int8:
        packed = packed.view(*of_rows, -1, BLOCK).transpose(-3, -2).contiguous()
    flat = scale.detach().float().reshape(of_rows).contiguous()
    return W8A8Weight(packed, flat, lay_bias(bias, q))


@triton.jit(do_not_specialize=["M"])
def w8a8_kernel(
    x, packed, x_scale, w_scale, bias, out, parts, arrivals, experts, pairs, M, N, K, step, pitch,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); the tile is transposed."""
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // BLOCK, SPLITS)
    first = split * share
    k = tl.arange(0, BLOCK)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, m, row, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (K * N)
        w_scale += expert * N
        if BIAS:
            bias += expert * N
    real = there[None, :]
    if WIDE:
        step, pitch = step.to(tl.int64), pitch.to(tl.int64)
    weights = packed + n[:, None] * pitch + k[None, :]
    columns = x + row[None, :] * K + k[:, None]
    if OVERLAP:
        for i in tl.static_range(AHEAD):
            if first + i < K // BLOCK:
                if packed.dtype.element_ty == tl.int8:  # a tile is one stretch
                    start = packed + (first + i) * step + tile * (OUTPUTS * BLOCK)
                    prefetch(start, OUTPUTS * BLOCK)
                else:
                    line = tl.arange(0, BLOCK // 128) * 128
                    prefetch_lines(packed + (first + i) * step + n[:, None] * pitch + line[None, :])
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], SUM)
    for g in tl.range(first, tl.minimum(first + share, K // BLOCK), num_stages=STAGES):
        w = tl.load(weights + g * step, eviction_policy="evict_first")
        xt = tl.load(columns + g * BLOCK, mask=real, other=0.0)
        acc = tl.dot(w, xt, acc, out_dtype=SUM, max_num_imprecise_acc=128)
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = row_tile * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        sx = tl.load(x_scale + row * PER_ROW, mask=there, other=0.0)
        y = acc.to(tl.float32) * (sx[None, :] * tl.load(w_scale + n)[:, None])
        if BIAS:
            y += tl.load(bias + n)[:, None]
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=real)


def w8a8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: W8A8Weight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """acc * (x_scale * w_scale) + bias.

    Args:
        xq: int8 or e4m3 [M, K], contiguous, of the weight's type.
        x_scale: fp32, one element or [M, 1].
        weight: From `pack_w8a8`, on the device of `xq`.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result.
        tile: How to cut it; by default the device's table says.
        sorted_rows: As in `kernels.triton.linear.w4a16.w4a16_linear`.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    (rows, places), outputs, inputs = rows_of(xq, sorted_rows), weight.outputs, weight.inputs
    check_inputs(xq, (weight.packed.dtype,), inputs)
    check_input_scale(x_scale, len(xq))
    family, number = FAMILY[xq.dtype], len(sorted_rows.experts) if sorted_rows else 0
    height = sorted_rows.rows if sorted_rows else rows
    tile = tile or tile_of(family, xq.device, height, outputs, inputs, out_dtype, number)
    if tile is None:
        return _library_linear(xq, x_scale, weight, out_dtype)
    out = torch.empty((rows, outputs), dtype=out_dtype, device=xq.device)
    if rows == 0:
        return out
    if tile.persistent:
        _launch_many(xq, x_scale, weight, workspace, out, tile)
    else:
        grid = grid_of(tile, rows, outputs, workspace, sorted_rows)
        _launch_swapped(xq, x_scale, weight, workspace, out, tile, grid, places)
    return out


@cache
def tile_of(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int,
    dtype: torch.dtype = torch.bfloat16, row_tiles: int = 0,
) -> Tile | None:  # fmt: skip
    """Measured, else by rule: that of many rows on sm_90, where outputs fit. None: cuBLASLt's.

    Of several `row_tiles` of experts always that of few rows, by rule.
    """
    wide = family == "fp8" and inputs % 256 == 0 and takes_wide_steps(device)
    step = 2 * BLOCK if wide else BLOCK
    if row_tiles:
        own = rule(family, multiprocessors(device), rows, outputs, inputs, row_tiles)
        return replace(own, inputs=step)
    library = family == "fp8" and _library_gives(dtype, device)
    if library and rows > LIBRARY_ROWS:
        return None
    found = measured_tile(family, device, rows, outputs, inputs)
    processors = multiprocessors(device)
    if found is None and is_sm_90(device):
        found = many_rows_rule(processors, rows, outputs, family == "fp8" and inputs > FAST_INPUTS)
    if found or (library and rows > 64):
        return found
    return replace(rule(family, processors, rows, outputs, inputs), inputs=step)


def _library_gives(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies fp8 to this type: where cuBLASLt cannot, it has kernels for bf16."""
    return device.type == "cuda" and (dtype == torch.bfloat16 or library_scales(device))


def many_rows_rule(processors: int, rows: int, outputs: int, long: bool = False) -> Tile | None:
    """The tile of the shortest time, if a round of tiles takes as long as a tile has results.

    What a tile costs beyond that is worth some 4096 results, as measured on an H100. `long` sums of
    fp8 need registers of their own. None for few rows.
    """

    def rounds(tile: Tile) -> int:
        tiles = -(-rows // tile.rows) * (outputs // tile.outputs)
        return -(-tiles // processors) * (tile.rows * tile.outputs + 4096)

    fitting = many_rows_tiles(outputs, long)
    return min(fitting, key=rounds) if rows > 64 and fitting else None


def many_rows_tiles(outputs: int, long: bool) -> list[Tile]:
    """The tiles of many rows that fit; see `many_rows_rule`."""
    most = LONG if long else 2 * LONG
    return [t for t in MANY if outputs % t.outputs == 0 and t.rows * t.outputs <= most]


def _launch_swapped(xq, x_scale, weight, workspace, out, tile, grid, places) -> None:
    (rows, outputs), inputs = out.shape, xq.shape[1]
    integers, parts = xq.dtype == torch.int8, workspace.parts
    if tile.splits > 1 and integers:
        parts = parts.view(torch.int32)
    require(weight.packed.is_contiguous(), "the packed weight is not contiguous")
    block = BLOCK if integers or inputs % tile.inputs else tile.inputs
    step, pitch = (outputs * BLOCK, BLOCK) if integers else (block, inputs)
    places["WIDE"] |= outputs * inputs > COUNTED
    w8a8_kernel[grid](
        xq, weight.packed, x_scale, weight.scale, weight.bias, out, parts, workspace.arrivals,
        M=rows, N=outputs, K=inputs, step=step, pitch=pitch, **places,
        OUTPUTS=tile.outputs, ROWS=tile.rows, SPLITS=tile.splits, STAGES=tile.stages, BLOCK=block,
        PER_ROW=int(x_scale.numel() > 1), BIAS=weight.bias is not None,
        SUM=tl.int32 if integers else tl.float32, **overlap(),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_many(xq, x_scale, weight, workspace, out, tile) -> None:
    (rows, inputs), outputs = xq.shape, out.shape[1]
    require(capability() == 90, f"{tile} is for sm_90; this is sm_{capability()}")
    require(
        outputs % tile.outputs == 0 and tile.outputs % 128 == 0 and tile.splits == 1,
        f"{tile} for {outputs} outputs; needed are 128 or 256 outputs, a divisor, and no splits",
    )
    groups, row_tiles = inputs // BLOCK, -(-rows // tile.rows)
    tiles = row_tiles * (outputs // tile.outputs)
    programs = min(multiprocessors(xq.device), tiles)
    long = xq.dtype != torch.int8 and inputs > FAST_INPUTS
    require(
        not long or tile.rows * tile.outputs <= LONG,
        f"{tile} for {inputs} inputs; of more than {FAST_INPUTS} a tile has {LONG} results at most",
    )
    packed = weight.packed.view(-1, weight.packed.shape[-1])
    w8a8_many_kernel[(programs,)](
        describe(xq, [tile.rows, BLOCK]),
        describe(packed, [tile.outputs, BLOCK]),
        describe(out, [min(128 // out.itemsize, tile.rows), 64]),
        x_scale, weight.scale, weight.bias, rows, outputs, tiles, groups, row_tiles,
        BAND=BAND_ROWS // tile.rows, STAGES=tile.stages, SEGMENT=SEGMENT if long else 0,
        PER_ROW=int(x_scale.numel() > 1), BIAS=weight.bias is not None, enable_fp_fusion=False,
        num_warps=4, maxnreg=65536 // THREADS // 8 * 8,
    )  # fmt: skip


def _library_linear(xq, x_scale, weight, out_dtype) -> Tensor:
    """fp8 by cuBLASLt; the scale of a tensor is spread over the rows."""
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        xq,
        weight.packed.t(),
        scale_a=x_scale.reshape(-1, 1).expand(xq.shape[0], 1).contiguous(),
        scale_b=weight.scale.reshape(1, -1),
        out_dtype=out_dtype,
        use_fast_accum=xq.shape[1] <= FAST_INPUTS,
    )
    return out if weight.bias is None else out.add_(weight.bias)
