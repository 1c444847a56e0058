"""W8A8: int8 or fp8 weights and activations, one scale an output channel, one a row or tensor.

    y[m, n] = (sum_k xq[m, k] wq[n, k]) (sx[m] sw[n]) + b[n]

int8 sums are exact in int32 and the epilogue is unfused fp32, so that a result equals
`kernels.reference.int8_linear` bit for bit, however it is cut. fp8 (e4m3) sums leave the tensor
cores, which keep about 14 bits, for fp32 every 128 inputs.

Weights lie [K / 128, N, 128]: at one step of the sum all programs read one contiguous stretch, and
the same array is a matrix of K / 128 * N rows for the TMA unit. fp8 weights stay [N, K], of which
that is a view, since cuBLASLt, which takes calls of many rows, wants them so. Its sums of more than
`FAST_INPUTS` inputs leave the tensor cores as often.

Two kernels. Up to some hundred rows the weight is the left operand (wgmma wants 64 rows there, x
has fewer), the sum is split where outputs are few. Beyond, a persistent one: a program an SM,
tiles by TMA, in strips of `STRIP` row tiles so that both operands stay in L2.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.common import (
    AHEAD,
    Workspace,
    announce,
    overlap,
    prefetch,
    prefetch_lines,
    require,
    sum_splits,
    wait,
)
from kernels.triton.tuning import Tile, gemm_tile, multiprocessors
from kernels.triton.weights import PackedWeight, check_input_scale, check_inputs, grid_of, lay_bias

BLOCK = 128  # inputs of a step; 256 where rows of a weight are far apart
STRIP = 16  # row tiles
FAMILY = {torch.int8: "w8a8", torch.float8_e4m3fn: "fp8"}
FP8_LIBRARY_ROWS = 64  # beyond these cuBLASLt is at the limit of the machine
FAST_INPUTS = 8192  # the tensor cores' own sums of more are off by a good part of e4m3's rounding


class W8A8Weight(PackedWeight):
    """A weight packed for `w8a8_linear`, `scale` fp32 [N].

    `packed` is int8 [K / 128, N, 128], or e4m3 [K / 256, N, 256], a view of [N, K].
    """


def pack_w8a8(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> W8A8Weight:
    """Lay a quantized weight out for `w8a8_linear`, on the device it is on.

    Args:
        q: int8 in [-127, 127] or e4m3, [N, K]; N a multiple of 64, K of 128.
        scale: fp32 [N] or [N, 1].
        bias: Float [N] or None.

    Raises:
        ValueError: a shape, type or value is another.
    """
    require(
        q.dim() == 2 and q.dtype in FAMILY and q.shape[0] % 64 == 0 and q.shape[1] % BLOCK == 0,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is int8 or float8_e4m3fn [N, K], N in 64s "
        f"and K in {BLOCK}s",
    )
    require(scale.numel() == q.shape[0], f"{scale.numel()} scales for {q.shape[0]} outputs")
    block = 2 * BLOCK if q.dtype != torch.int8 and q.shape[1] % (2 * BLOCK) == 0 else BLOCK
    packed = q.contiguous().view(q.shape[0], -1, block).transpose(0, 1)
    if q.dtype == torch.int8:
        require(not bool((q == -128).any()), "weight holds -128; the range is [-127, 127]")
        packed = packed.contiguous()
    flat = scale.detach().float().reshape(-1).contiguous()
    return W8A8Weight(packed, flat, lay_bias(bias, len(q)))


@triton.jit(do_not_specialize=["M"])
def w8a8_kernel(
    x, packed, x_scale, w_scale, bias, out, parts, arrivals, M, N, K, step, pitch,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); the tile is transposed, [OUTPUTS, ROWS]."""
    tile, split, strip = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // BLOCK, SPLITS)
    first = split * share
    k = tl.arange(0, BLOCK)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    real = (m < M)[None, :]
    weights = packed + n[:, None] * pitch + k[None, :]
    columns = x + m[None, :] * K + k[:, None]
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
        number = strip * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        sx = tl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0)
        y = acc.to(tl.float32) * (sx[None, :] * tl.load(w_scale + n)[:, None])
        if BIAS:
            y += tl.load(bias + n)[:, None]
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["M"])
def w8a8_persistent_kernel(
    x, packed, out, x_scale, w_scale, bias, M, N, K,
    STRIP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """x, packed (as [K / 128 * N, 128]) and out are TMA descriptors; any number of programs.

    A tile is stored in halves, which leaves shared memory for another stage of loads.
    """
    row_tiles, output_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, OUTPUTS)
    for t in tl.range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        first = t // (STRIP * output_tiles) * STRIP
        height = tl.minimum(row_tiles - first, STRIP)
        row = (first + t % (STRIP * output_tiles) % height) * ROWS
        output = t % (STRIP * output_tiles) // height * OUTPUTS
        acc = tl.zeros([ROWS, OUTPUTS], SUM)
        for g in tl.range(0, K // 128, num_stages=STAGES):
            xs, w = x.load([row, g * 128]), packed.load([g * N + output, 0]).T
            acc = tl.dot(xs, w, acc, out_dtype=SUM, max_num_imprecise_acc=128)
        m = row + tl.arange(0, ROWS)
        sx = tl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0)[:, None]
        low, high = acc.reshape(ROWS, 2, OUTPUTS // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            n = output + half * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
            y = (high if half else low).to(tl.float32)
            y *= sx * tl.load(w_scale + n, mask=n < N, other=0.0)[None, :]
            if BIAS:
                y += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
            out.store([row, output + half * (OUTPUTS // 2)], y.to(out.dtype))


def w8a8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: W8A8Weight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """acc * (x_scale * w_scale) + bias.

    Args:
        xq: int8 or e4m3 [M, K], contiguous, of the weight's type.
        x_scale: fp32, one element or [M, 1].
        weight: From `pack_w8a8`, on the device of `xq`.
        workspace: Of the stream that this runs in.
        out_dtype: Element type of the result.
        tile: How to cut it; by default the device's table says.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    (rows, inputs), (blocks, outputs, block) = xq.shape, weight.packed.shape
    check_inputs(xq, (weight.packed.dtype,), blocks * block)
    check_input_scale(x_scale, rows)
    if tile is None and xq.is_cuda and xq.dtype != torch.int8 and rows > FP8_LIBRARY_ROWS:
        return _library_linear(xq, x_scale, weight, out_dtype)
    out = torch.empty((rows, outputs), dtype=out_dtype, device=xq.device)
    if rows == 0:
        return out
    tile = tile or gemm_tile(FAMILY[xq.dtype], xq.device, rows, outputs, inputs)
    launch = _launch_persistent if tile.persistent else _launch_swapped
    launch(xq, x_scale, weight, workspace, out, tile)
    return out


def _common(x_scale: Tensor, weight: W8A8Weight, tile: Tile, stages: int) -> dict:
    """Arguments by name that both kernels take; no fused multiply-add, which would round once."""
    return {
        "OUTPUTS": tile.outputs,
        "ROWS": tile.rows,
        "STAGES": stages,
        "PER_ROW": int(x_scale.numel() > 1),
        "BIAS": weight.bias is not None,
        "SUM": tl.int32 if weight.packed.dtype == torch.int8 else tl.float32,
        "num_warps": tile.warps,
        "num_stages": stages,
        "enable_fp_fusion": False,
    }


def _launch_swapped(xq, x_scale, weight, workspace, out, tile) -> None:
    rows, inputs = xq.shape
    outputs = out.shape[1]
    grid, parts = grid_of(tile, rows, outputs, workspace), workspace.parts
    if tile.splits > 1 and xq.dtype == torch.int8:
        parts = parts.view(torch.int32)
    step, pitch, _ = weight.packed.stride()
    w8a8_kernel[grid](
        xq, weight.packed, x_scale, weight.scale, weight.bias, out, parts, workspace.arrivals,
        rows, outputs, inputs, step, pitch, SPLITS=tile.splits, BLOCK=weight.packed.shape[2],
        **overlap(), **_common(x_scale, weight, tile, tile.stages),
    )  # fmt: skip


def _launch_persistent(xq, x_scale, weight, _, out, tile) -> None:
    rows, inputs = xq.shape
    outputs = out.shape[1]
    require(weight.packed.is_contiguous(), "the kernel for many rows takes int8 weights alone")
    stages = min(tile.stages, 3) if out.dtype == torch.float32 else tile.stages  # memory for a tile
    describe = TensorDescriptor.from_tensor
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    w8a8_persistent_kernel[(min(multiprocessors(xq.device), tiles),)](
        describe(xq, [tile.rows, BLOCK]),
        describe(weight.packed.view(-1, BLOCK), [tile.outputs, BLOCK]),
        describe(out, [tile.rows, tile.outputs // 2]),
        x_scale, weight.scale, weight.bias, rows, outputs, inputs, STRIP=STRIP,
        **_common(x_scale, weight, tile, stages),
    )  # fmt: skip


def _library_linear(xq, x_scale, weight, out_dtype) -> Tensor:
    """fp8 by cuBLASLt; the scale of a tensor is spread over the rows."""
    w = weight.packed.transpose(0, 1).reshape(weight.packed.shape[1], -1)  # a view of [N, K]
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        xq,
        w.t(),
        scale_a=x_scale.reshape(-1, 1).expand(xq.shape[0], 1).contiguous(),
        scale_b=weight.scale.reshape(1, -1),
        out_dtype=out_dtype,
        use_fast_accum=xq.shape[1] <= FAST_INPUTS,
    )
    return out if weight.bias is None else out.add_(weight.bias)
