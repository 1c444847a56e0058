"""fp8 in blocks: e4m3 weights with a scale a block of 128 x 128, e4m3 rows with one a run of 128.

    y[m, n] = sum_g sx[m, g] sw[n / 128, g] (sum_{k in g} xq[m, k] wq[n, k]) + b[n]

g counts runs of 128 inputs. This is the arithmetic of DeepSeek-V3 (arXiv 2412.19437, section 3.3):
the sum of a run stays in the tensor cores, which keep about 14 bits, and is scaled into an fp32 sum
outside of them.

Weights stay [N, K], as cuBLASLt wants them; it takes calls of many rows on Hopper, where nothing
that Triton makes of two sums in registers comes near it. All else is one kernel, with the weight as
the left operand (see `kernels.triton.linear.w8a8`): a step loads two runs, since longer stretches
of a row of W are read faster. Devices before Ada have no e4m3 products: there both operands become
fp16 in registers, less a factor of 256 each, which is exact.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    AHEAD,
    ASM,
    Workspace,
    announce,
    capability,
    library_scales,
    overlap,
    prefetch_lines,
    require,
    storage,
    sum_splits,
    takes_wide_steps,
    wait,
)
from kernels.triton.experts.sorting import SortedRows, rows_of, rows_of_tile, tile_of
from kernels.triton.linear.packed import grid_of, lay_bias
from kernels.triton.tuning import Tile

RUN = 128
LIBRARY_ROWS = 64  # beyond these cuBLASLt is ahead
LIBRARY_TYPES = (torch.bfloat16, torch.float16)
BAND = 8  # row tiles that are taken together, so that their weights are read once

# Two words of two fp16 from four e4m3: s eeee mmm becomes s 0eeee mmm0000000, the 256th.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b32 a, b, s;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 1;
and.b32 s, s, 0x3F803F80;
lop3.b32 $0, a, 0x80008000, s, 0xEA;
shr.u32 s, b, 1;
and.b32 s, s, 0x3F803F80;
lop3.b32 $1, b, 0x80008000, s, 0xEA; }""")


@dataclass(frozen=True)
class Fp8BlockWeight:
    """A weight packed for `fp8_block_linear`.

    Attributes:
        packed: e4m3 [N', K'], zeros appended up to 64s of outputs and 128s of inputs.
        scale: fp32 [N' / 128, K' / 128], both rounded up, rows padded to fours.
        bias: fp32 [N] or None.
        outputs: N.
        inputs: K.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(t.nbytes for t in (self.packed, self.scale, self.bias) if t is not None)


def pack_fp8_block(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Fp8BlockWeight:
    """Lay a quantized weight out for `fp8_block_linear`, on the device it is on.

    Args:
        q: e4m3 [N, K], K a multiple of 16.
        scale: fp32 [ceil(N / 128), ceil(K / 128)].
        bias: Float [N] or None.

    Raises:
        ValueError: a shape or type is another.
    """
    require(
        q.dim() >= 2 and q.dtype == torch.float8_e4m3fn and q.shape[-1] % 16 == 0,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is float8_e4m3fn [N, K], K in 16s",
    )
    *experts, outputs, inputs = q.shape
    blocks = (*experts, -(-outputs // RUN), -(-inputs // RUN))
    require(
        tuple(scale.shape) == blocks,
        f"scales are {tuple(scale.shape)}; needed is one for each block of 128 x 128, {blocks}",
    )
    bias = lay_bias(bias, q)
    q = F.pad(q.view(torch.int8), (0, -inputs % RUN, 0, -outputs % 64)).view(q.dtype)
    scale = F.pad(scale.detach().float(), (0, -scale.shape[-1] % 4))
    return Fp8BlockWeight(q.contiguous(), scale.contiguous(), bias, outputs, inputs)


@triton.jit
def operand(x, NATIVE: tl.constexpr):
    """e4m3 as it is; or its bits in int8 to fp16, the 256th of their value."""
    if NATIVE:
        y = x
    elif ASM:
        y = tl.inline_asm_elementwise(
            E4M3_TO_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = x.to(tl.int16)
        y = (((wide & 0x7F) << 7) | (wide & -32768)).to(tl.float16, bitcast=True)
    return y


@triton.jit(do_not_specialize=["M", "run_step"])
def fp8_block_kernel(
    x, packed, x_scale, w_scale, bias, out, parts, arrivals, experts, pairs, M, N, K,
    width, row_step, run_step, blocks,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    RUNS: tl.constexpr, BAND: tl.constexpr, NATIVE: tl.constexpr, RAGGED: tl.constexpr,
    BIAS: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); RUNS runs a step, RAGGED: K is not whole."""
    row_tile, tile = tl.swizzle2d(
        tl.program_id(2), tl.program_id(0), tl.num_programs(2), tl.num_programs(0), BAND
    )
    split = tl.program_id(1)
    steps = width // (128 * RUNS)
    share = tl.cdiv(steps, SPLITS)
    first = split * share
    k = tl.arange(0, 128)
    output, row = tile * OUTPUTS, row_tile * ROWS
    i, j = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)  # offsets within a tile fit in 32 bits
    n = output + i
    expert, m, token, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (tl.num_programs(0) * OUTPUTS * width)
        w_scale += expert * (tl.cdiv(N, 128) * blocks)
        if BIAS:
            bias += expert * N
    real = there[None, :]
    weights = packed + output.to(tl.int64) * width + (i[:, None] * width + k[None, :])
    columns = x + row.to(tl.int64) * K + (j[None, :] * K + k[:, None])  # [128, ROWS], x transposed
    if experts is not None:
        columns = x + token.to(tl.int64)[None, :] * K + k[:, None]
    one: tl.constexpr = OUTPUTS <= 128  # block of the weight: its scale is put to those of rows
    of_outputs = w_scale + (output if one else n) // 128 * blocks
    of_rows = x_scale + token * row_step
    if OVERLAP:
        for ahead in tl.static_range(AHEAD * RUNS):
            if first * RUNS + ahead < width // 128:
                at = packed + output.to(tl.int64) * width + (first * RUNS + ahead) * 128
                prefetch_lines(at + i * width)
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(first, tl.minimum(first + share, steps), num_stages=STAGES):
        for run in tl.static_range(RUNS):
            g = step * RUNS + run
            w = tl.load(weights + g * 128, eviction_policy="evict_first")
            if RAGGED:
                xt = tl.load(columns + g * 128, mask=real & (g * 128 + k < K)[:, None], other=0.0)
            else:
                xt = tl.load(columns + g * 128, mask=real, other=0.0)
            sw = tl.load(of_outputs + g)
            sx = tl.load(of_rows + g * run_step, mask=there, other=0.0)
            part = tl.dot(operand(w, NATIVE), operand(xt, NATIVE), out_dtype=tl.float32)
            acc += part * ((sw * sx)[None, :] if one else sw[:, None] * sx[None, :])
    last = True
    if SPLITS > 1:
        own = i[:, None] * ROWS + j[None, :]
        number = row_tile * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        y = acc if NATIVE else acc * 65536.0
        if BIAS:
            y += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
        place = out + row.to(tl.int64) * N + output + (j[None, :] * N + i[:, None])
        if experts is not None:
            place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=real & (n < N)[:, None])


def fp8_block_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: Fp8BlockWeight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    sorted_rows: SortedRows | None = None,
) -> Tensor:
    """x W^T + bias of e4m3 rows.

    Args:
        xq: e4m3 [M, K], contiguous.
        x_scale: fp32 [M, ceil(K / 128)], any strides; those of `quantize_rows` are the fastest.
        weight: From `pack_fp8_block`, on the device of `xq`.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result.
        tile: How to cut it; by default the device's table says, or cuBLASLt runs.
        sorted_rows: As in `kernels.triton.linear.w4a16.w4a16_linear`.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    rows, inputs = xq.shape
    require(
        xq.dtype == torch.float8_e4m3fn and xq.is_contiguous(),
        f"x is {xq.dtype}; needed is contiguous float8_e4m3fn",
    )
    require(inputs == weight.inputs, f"x has {inputs} inputs, the weight {weight.inputs}")
    runs = weight.packed.shape[1] // RUN
    require(
        x_scale.shape == (rows, runs) and x_scale.dtype == torch.float32,
        f"scales of x are {x_scale.dtype} {tuple(x_scale.shape)}; needed is one for each run of "
        f"128, fp32 {(rows, runs)}",
    )
    if (
        tile is None
        and sorted_rows is None
        and rows > LIBRARY_ROWS
        and _library_takes(weight, out_dtype)
    ):
        return library_linear(xq, x_scale, weight, out_dtype)
    rows, places = rows_of(xq, sorted_rows)
    out = torch.empty((rows, weight.outputs), dtype=out_dtype, device=xq.device)
    if rows:
        tile = tile or tile_of("fp8_block", xq, *weight.packed.shape, sorted_rows)
        grid = grid_of(tile, rows, len(weight.packed), workspace, sorted_rows)
        _launch(xq, x_scale, weight, workspace, out, tile, grid, places)
    return out


def _launch(xq, x_scale, weight, workspace, out, tile, grid, places) -> None:
    inputs, width = xq.shape[1], weight.packed.shape[1]
    small = tile.outputs <= 128 and tile.outputs * tile.rows <= 64 * 64
    runs = 2 if small and width % (2 * RUN) == 0 and takes_wide_steps(xq.device) else 1
    fp8_block_kernel[grid](
        storage(xq), storage(weight.packed), x_scale, weight.scale, weight.bias, out,
        workspace.parts, workspace.arrivals, M=len(out), N=weight.outputs, K=inputs, width=width,
        row_step=x_scale.stride(0), run_step=x_scale.stride(1), blocks=weight.scale.shape[1],
        **places, OUTPUTS=tile.outputs, ROWS=tile.rows,
        SPLITS=tile.splits, STAGES=tile.stages, RUNS=runs,
        BAND=BAND, NATIVE=capability() >= 89, RAGGED=inputs != width,
        BIAS=weight.bias is not None, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True, **overlap(),
    )  # fmt: skip


def _library_takes(weight: Fp8BlockWeight, out_dtype: torch.dtype) -> bool:
    whole = weight.outputs % RUN == 0 and weight.inputs % RUN == 0
    return whole and out_dtype in LIBRARY_TYPES and library_scales(weight.packed.device)


def library_linear(
    xq: Tensor, x_scale: Tensor, weight: Fp8BlockWeight, out_dtype: torch.dtype
) -> Tensor:
    """The same by cuBLASLt, on Hopper alone; N and K are multiples of 128.

    It wants the scales of x by run, 16 bytes of a run at a time: rows are padded to fours, by what
    lies in memory, since no row sees another.
    """
    rows, whole = xq.shape[0], xq.shape[0] + -xq.shape[0] % 4
    if whole != rows:
        padded = torch.empty((whole, xq.shape[1]), dtype=xq.dtype, device=xq.device)
        padded[:rows].copy_(xq)
        xq = padded
    if whole != rows or x_scale.stride() != (1, rows):
        by_run = torch.empty((x_scale.shape[1], whole), device=xq.device)
        by_run[:, :rows].copy_(x_scale.t())
        x_scale = by_run.t()
    out = F.scaled_mm(
        xq,
        weight.packed.t(),
        x_scale,
        F.ScalingType.BlockWise1x128,
        weight.scale.t(),
        F.ScalingType.BlockWise128x128,
        swizzle_a=F.SwizzleType.NO_SWIZZLE,
        swizzle_b=F.SwizzleType.NO_SWIZZLE,
        output_dtype=out_dtype,
    )[:rows]
    return out if weight.bias is None else out.add_(weight.bias)
