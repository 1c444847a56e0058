"""y = x W^T of few rows, every program reading an equal share of the weight.

    y[m, n] = (sum_k x[m, k] w[n, k]) (sx[m] sw[n]) + b[n]        (without sx sw for float weights)

Reading the weight is all the work: tiles of W and steps of the sum are numbered tile by tile, and
program p takes the numbers from p * share on, one after the other, so that loads of the next tile
are under way while one is finished, and no SM waits for others that have a tile more. A tile that
several programs share is summed by the last of them to arrive, in the order of the steps: what a
sum is does not depend on who came first (Osama et al. 2023, Stream-K, but for that order).

The weight is the left operand (wgmma wants 64 rows there, x has fewer), from [N, K] as it is or
[K / BLOCK, N, BLOCK] as packed, by TMA (`weight` and `x` are descriptors) or by pointers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.common import ASM, Workspace, capability, require
from kernels.triton.tuning import Tile, multiprocessors


@triton.jit
def all_here(number):
    """A barrier of the program's threads; with `tl.debug_barrier` in it a loop is not pipelined."""
    if ASM:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [number], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finish(
    acc, x_scale, w_scale, bias, out, parts, arrivals, M, N, tile, blocks, share, strip,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, PER_ROW: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile, or leave a part of it; the last of its programs stores the sum of all parts.

    A program leaves at most two parts, of its first tile and of its last.
    """
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    real = (m < M)[None, :]
    last = True
    if PARTS > 1:
        first_part, last_part = tile * blocks // share, ((tile + 1) * blocks - 1) // share
        if last_part > first_part:
            own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            own += strip * (2 * tl.num_programs(0) * OUTPUTS * ROWS)
            p = tl.program_id(0)
            slot = 2 * p + (tile != p * share // blocks).to(tl.int32)
            tl.store(parts + slot * (OUTPUTS * ROWS) + own, acc, mask=real)
            all_here(tile)
            count = arrivals + strip * (N // OUTPUTS) + tile
            last = tl.atomic_add(count, 1, sem="acq_rel") == last_part - first_part
            if last:
                all_here(tile)
                acc = tl.zeros_like(acc)
                for i in tl.static_range(PARTS):  # a loop here would keep loads from running ahead
                    q = first_part + i
                    slot = 2 * q + (tile != q * share // blocks).to(tl.int32)
                    place = parts + slot * (OUTPUTS * ROWS) + own
                    given = real & (q <= last_part)
                    acc += tl.load(place, mask=given, other=0, cache_modifier=".cg")
                tl.store(count, 0)
    if last:
        y = acc.to(tl.float32)
        if SCALED:
            sx = tl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0)
            y *= sx[None, :] * tl.load(w_scale + n)[:, None]
        if BIAS:
            y += tl.load(bias + n)[:, None].to(tl.float32)
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["M", "share"])
def stream_kernel(
    x, weight, x_scale, w_scale, bias, out, parts, arrivals, M, N, K, share, step, pitch,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ONE: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr, BLOCKED: tl.constexpr,
    SCALED: tl.constexpr, PER_ROW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Program (share of the weight, tile of rows); tiles are transposed, [OUTPUTS, ROWS].

    `ONE`: no share is of more than one tile; `PARTS`: shares that a tile can have a part in.
    """
    strip = tl.program_id(1)
    blocks = K // BLOCK
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, blocks * (N // OUTPUTS))
    k = tl.arange(0, BLOCK)
    row = tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([OUTPUTS, ROWS], SUM)
    for unit in tl.range(first, end, num_stages=STAGES):
        tile, g = unit // blocks, unit % blocks
        if TMA:
            n = tile * OUTPUTS
            w = weight.load([n + g * N, 0]) if BLOCKED else weight.load([n, g * BLOCK])
            xt = x.load([strip * ROWS, g * BLOCK]).T
        else:
            place = weight + tile.to(tl.int64) * (OUTPUTS * pitch) + g.to(tl.int64) * step
            w = tl.load(place + row[:, None] * pitch + k[None, :], eviction_policy="evict_first")
            columns = x + m[None, :] * K + g * BLOCK + k[:, None]
            xt = tl.load(columns, mask=(m < M)[None, :], other=0.0)
        acc = tl.dot(w, xt, acc, out_dtype=SUM, max_num_imprecise_acc=128)
        if not ONE and (g == blocks - 1 or unit == end - 1):
            finish(
                acc, x_scale, w_scale, bias, out, parts, arrivals, M, N, tile, blocks, share, strip,
                OUTPUTS, ROWS, PER_ROW, SCALED, BIAS, PARTS,
            )  # fmt: skip
            acc = tl.zeros_like(acc)
    if ONE and first < end:
        finish(
            acc, x_scale, w_scale, bias, out, parts, arrivals, M, N, first // blocks, blocks, share,
            strip, OUTPUTS, ROWS, PER_ROW, SCALED, BIAS, PARTS,
        )  # fmt: skip


def stream(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    workspace: Workspace,
    tile: Tile,
    scales: tuple[Tensor, Tensor] | None = None,
    tma: bool | None = None,
) -> None:
    """Launch `stream_kernel`.

    Args:
        x: [M, K], contiguous.
        weight: Of the type of x, [N, K] or [K / block, N, block].
        out: [M, N], written.
        bias: Float [N] or None.
        workspace: Of the stream that this runs in.
        tile: How to cut it. `splits` programs an SM where it is persistent, else a tile of outputs.
        scales: Of rows (one or M) and of outputs, fp32.
        tma: Whether loads are the TMA unit's; by default where there is one.

    Raises:
        ValueError: the tile does not divide the weight, or the workspace is too small.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    blocked = weight.dim() == 3
    block = weight.shape[2] if blocked else min(tile.inputs, inputs)
    step, pitch = (weight.stride(0), weight.stride(1)) if blocked else (block, inputs)
    require(
        outputs % tile.outputs == 0 and inputs % block == 0,
        f"a weight of {outputs} outputs and {inputs} inputs is not cut by tiles of {tile.outputs} "
        f"and {block}",
    )
    blocks, tiles, strips = inputs // block, outputs // tile.outputs, triton.cdiv(rows, tile.rows)
    programs = tile.splits * (multiprocessors(x.device) if tile.persistent else tiles)
    share = triton.cdiv(blocks * tiles, programs)
    programs = triton.cdiv(blocks * tiles, share)
    one, most = blocks % share == 0, 1 if share % blocks == 0 else triton.cdiv(blocks, share) + 1
    if one:
        most = blocks // share
    if most > 1:
        parts = 2 * programs * strips * tile.outputs * tile.rows
        workspace.check(parts, tiles * strips)
    integers = weight.dtype == torch.int8
    tma = capability() >= 90 if tma is None else tma
    operands = x, weight
    if tma:
        describe = TensorDescriptor.from_tensor
        flat = weight.view(-1, block) if blocked else weight
        operands = describe(x, [tile.rows, block]), describe(flat, [tile.outputs, block])
    x_scale, w_scale = scales or (None, None)
    stream_kernel[(programs, strips)](
        *operands, x_scale, w_scale, bias, out,
        workspace.parts.view(torch.int32) if integers else workspace.parts, workspace.arrivals,
        rows, outputs, inputs, share, step, pitch,
        OUTPUTS=tile.outputs, ROWS=tile.rows, BLOCK=block, STAGES=tile.stages,
        ONE=one, PARTS=most, TMA=tma, BLOCKED=blocked,
        SCALED=scales is not None, PER_ROW=int(x_scale is not None and x_scale.numel() > 1),
        BIAS=bias is not None, SUM=tl.int32 if integers else tl.float32,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
