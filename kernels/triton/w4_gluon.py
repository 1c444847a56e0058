"""4-bit weights times many rows on Hopper: W4A16 and W4A8, warps with roles of their own (Gluon).

The sums and the packed weights are those of `kernels.triton.w4a16` and `kernels.triton.w4a8`, whose
kernels load, unpack and multiply in turn; here the three go on at once:

- One warp copies tiles of packed weights, scales and x by TMA into a ring in shared memory.
- Two warpgroups take half of a tile's outputs each. Packed words go from the ring to registers,
  become the left operand there, and meet x^T, which the tensor cores read from the ring.
- Products are asynchronous: the next operand is unpacked while the last one is multiplied, and one
  warpgroup's fp32 work on a group's exact sum (W4A8) falls into the other's product.

A program takes an equal run of `share` (tile, group of 128 inputs) pairs, so that no SM waits for
others. A tile that a run cuts is left in parts in the workspace; the last to arrive adds them up,
in order. `share` = all groups of a tile is the plain grid. Results leave transposed, by TMA.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.common import Workspace, require
from kernels.triton.tuning import Tile, gemm_tile, multiprocessors
from kernels.triton.w4a8 import W4A8Weight
from kernels.triton.w4a8 import w4a8_linear as plain_w4a8_linear
from kernels.triton.w4a16 import GROUP, W4A16Weight
from kernels.triton.w4a16 import w4a16_linear as plain_w4a16_linear

# Bits 0 to 7 of both halves of a word, less 8 and times the scale, in fp16 and in bf16.
FP16 = gl.constexpr("""{ .reg .b32 a, bias, part, high;
mov.b32 bias, 0x64086408; mov.b32 part, 0x2C002C00; mov.b32 high, 0xD480D480;
lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 a, a, bias; mul.rn.f16x2 a, a, $5; mov.b32 {$0, $1}, a;
lop3.b32 a, $4, 0x00F000F0, 0x64006400, 0xEA;
fma.rn.f16x2 a, a, part, high; mul.rn.f16x2 a, a, $5; mov.b32 {$2, $3}, a; }""")
BF16 = gl.constexpr("""{ .reg .b32 a, t, bias;
mov.b32 bias, 0x43084308;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, bias; mul.rn.bf16x2 a, a, $5; mov.b32 {$0, $1}, a;
shr.u32 t, $4, 4;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, bias; mul.rn.bf16x2 a, a, $5; mov.b32 {$2, $3}, a; }""")
SIXTEENFOLD = gl.constexpr("""{ .reg .b32 t;
shl.b32 t, $2, 4;
and.b32 $0, t, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0; }""")  # as in kernels.triton.w4a8
_LANES = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], _LANES, [[4, 0], [8, 0]], [], [32, 32]
    )
)  # int32 [32, 32], a packed tile of 64 outputs: 16 bytes a thread and load
BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [16, 0]],
        [[row, 4 * column] for row, column in _LANES],
        [[4, 0], [8, 0]],
        [],
        [32, 128],
    )
)  # the same tile as int8 [32, 128]


@gluon.jit
def float_operand(words, scale, CHUNK: gl.constexpr, dtype: gl.constexpr):
    """Words [64 outputs, 16] and doubled scales [64, 1] -> weights [64, 64], the CHUNK-th inputs."""
    if CHUNK == 1:
        words = words >> 8
    half = gl.bfloat16 if dtype == gl.bfloat16 else gl.float16
    a0, b0, a1, b1 = gl.inline_asm_elementwise(
        BF16 if dtype == gl.bfloat16 else FP16,
        "=h,=h,=h,=h,r,r",
        [words, scale],
        dtype=(half, half, half, half),
        is_pure=True,
        pack=1,
    )
    w = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [outputs, t, j, h]
    return w.permute([0, 2, 1, 3]).reshape([64, 64])


@gluon.jit
def int_operand(packed):
    """Packed bytes [32, 128] -> sixteenfold weights int8 [64 outputs, 128]."""
    low, high = gl.inline_asm_elementwise(
        SIXTEENFOLD, "=r,=r,r", [packed], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    w = gl.join(low, high).reshape([2, 4, 8, 4, 4, 4, 2])  # b, a, c, quad, j, byte, half
    return w.permute([1, 0, 2, 4, 6, 3, 5]).reshape([64, 128])


@gluon.jit
def doubled(scale, dtype: gl.constexpr):
    """Scales [64] -> words [64, 1] that hold each twice, in the type of x."""
    word = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,r",
        [scale.to(gl.float32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.expand_dims(word, 1)


@gluon.jit
def load_tiles(x, packed, scale, rings, bars, sizes, INT8: gl.constexpr):
    """The warp of copies: fills the ring's stages as they are left."""
    xs, ws, ss = rings
    ready, empty = bars
    strips, N, groups, share, total = sizes
    STAGES: gl.constexpr = ws.shape[0]
    CHUNKS: gl.constexpr = 1 if INT8 else 2
    OUTPUTS: gl.constexpr = ss.shape[1]
    ROWS: gl.constexpr = xs.shape[1]
    first = gl.program_id(0) * share
    for i in range(first, gl.minimum(first + share, total)):
        tile, g = i // groups, i % groups
        column, row = tile // strips * OUTPUTS, tile % strips * ROWS
        stage, phase = (i - first) % STAGES, (i - first) // STAGES & 1
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(bar, packed.block_type.nbytes + scale.block_type.nbytes
                        + CHUNKS * x.block_type.nbytes)  # fmt: skip
        place = (g * (N // 64) + column // 64) * 32
        tma.async_copy_global_to_shared(packed, [place, 0], bar, ws.index(stage))
        tma.async_copy_global_to_shared(scale, [g * N + column], bar, ss.index(stage))
        for c in gl.static_range(CHUNKS):
            inputs = g * 128 + c * 64
            tma.async_copy_global_to_shared(x, [row, inputs], bar, xs.index(stage * CHUNKS + c))


@gluon.jit
def zeros(TILES: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Accumulators of TILES tiles of 64 outputs."""
    accs = ()
    for _ in gl.static_range(TILES):
        accs = accs + (gl.full([64, ROWS], 0.0, gl.float32, layout=MMA),)
    return accs


@gluon.jit
def fetch(rings, stage, TILE: gl.constexpr, MMA: gl.constexpr):
    """Packed weights and scales of 64 outputs of a stage, in registers."""
    xs, ws, ss = rings
    packed, scale = ws.index(stage).slice(TILE * 32, 32), ss.index(stage).slice(TILE * 64, 64)
    if xs.dtype == gl.int8:
        return packed.load(BYTES), scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)
    else:
        words = packed.load(WORDS).reshape([2, 4, 8, 4, 4]).permute([1, 0, 2, 4, 3])
        words = words.reshape([64, 16])
        return words, doubled(scale.load(gl.SliceLayout(1, words.type.layout)), xs.dtype)


@gluon.jit
def operand(packed, scale, CHUNK: gl.constexpr, DT: gl.constexpr, MMA: gl.constexpr):
    """The left operand of a product: 64 outputs, the CHUNK-th 128 bytes of a group's inputs."""
    if DT == gl.int8:
        w = int_operand(packed)
    else:
        w = float_operand(packed, scale, CHUNK, DT)
    left: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 if DT == gl.int8 else 2)
    return gl.convert_layout(w, left, assert_trivial=True)


@gluon.jit
def multiply(accs, rings, bars, first, low, high, PART: gl.constexpr, MMA: gl.constexpr):
    """Add groups low to high. The scale multiplies the weight, or, in W4A8, a group's exact sum.

    The next operand is made while the last is multiplied; nothing is on its way from one round of
    the loop to the next, without which the assembler would wait for every product.
    """
    xs, ws, ss = rings
    ready, empty = bars
    DT: gl.constexpr = xs.dtype
    TILES: gl.constexpr = len(accs)
    CHUNKS: gl.constexpr = 1 if DT == gl.int8 else 2
    LAST: gl.constexpr = CHUNKS * TILES - 1
    STAGES: gl.constexpr = ws.shape[0]
    TILE: gl.constexpr = PART * TILES
    zero = gl.full([64, xs.shape[1]], 0, gl.int32, layout=MMA)
    stage, phase = (low - first) % STAGES, (low - first) // STAGES & 1
    if DT != gl.int8:
        mbarrier.wait(ready.index(stage), phase)
        packed, scale = fetch(rings, stage, TILE, MMA)
        w = operand(packed, scale, 0, DT, MMA)
    for i in range(low + 1, high + 1):
        following, turn = (i - first) % STAGES, (i - first) // STAGES & 1
        if DT == gl.int8:  # bytes that go round the loop would each take a register
            mbarrier.wait(ready.index(stage), phase)
            packed, scale = fetch(rings, stage, TILE, MMA)
            w = operand(packed, scale, 0, DT, MMA)
        for step in gl.static_range(LAST + 1):  # TILES times CHUNKS
            xt = xs.index(stage * CHUNKS + step % CHUNKS).permute([1, 0])
            own = scale
            if DT == gl.int8:
                exact = warpgroup_mma(w, xt, zero, use_acc=False, is_async=True)
            else:
                product = warpgroup_mma(w, xt, accs[step // CHUNKS], is_async=True)
                accs = put(accs, step // CHUNKS, product)
                if step > 0:
                    accs = wait(accs, 1)
            if step < LAST:
                if (step + 1) % CHUNKS == 0:
                    packed, scale = fetch(rings, stage, TILE + (step + 1) // CHUNKS, MMA)
                w = operand(packed, scale, (step + 1) % CHUNKS, DT, MMA)
            elif DT != gl.int8:
                mbarrier.wait(ready.index(following), turn, pred=i < high)
                packed, scale = fetch(rings, following, TILE, MMA)
                w = operand(packed, scale, 0, DT, MMA)
                accs = wait(accs, 0)
            if DT == gl.int8:
                exact = warpgroup_mma_wait(0, deps=(exact,))
            if step == LAST:
                mbarrier.arrive(empty.index(stage))
            if DT == gl.int8:
                accs = put(accs, step, promote(accs[step], exact, gl.expand_dims(own, 1)))
        stage, phase = following, turn
    return accs


@gluon.jit
def promote(acc, exact, scale):
    """acc + exact * scale, before the next product starts: there is no room for two exact sums."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 f; cvt.rn.f32.s32 f, $1; fma.rn.f32 $0, f, $2, $3; }",
        "=f,r,f,f",
        [exact, scale, acc],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def put(accs, T: gl.constexpr, new):
    """The tuple with its T-th element replaced."""
    changed = ()
    for t in gl.static_range(len(accs)):
        changed = changed + (new if t == T else accs[t],)
    return changed


@gluon.jit
def wait(accs, LEFT: gl.constexpr):
    """Wait until all but LEFT products are done."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(LEFT, deps=accs),)
    else:
        return warpgroup_mma_wait(LEFT, deps=accs)


@gluon.jit
def sum_parts(accs, parts, arrivals, tile, low, high, groups, share, PART: gl.constexpr):
    """Leave a cut tile's part; the last of its programs to arrive gets the sum of all, in order."""
    TILES: gl.constexpr = len(accs)
    MMA: gl.constexpr = accs[0].type.layout
    ROWS: gl.constexpr = accs[0].shape[1]
    SIZE: gl.constexpr = 64 * ROWS
    n = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)), 0)
    cells = PART * TILES * SIZE + n * ROWS + m
    begin = tile * groups
    slot = gl.program_id(0) * 2 + (low == begin).to(gl.int32)  # a run cuts its first and last tile
    own = parts + slot.to(gl.int64) * (2 * TILES * SIZE) + cells
    for t in gl.static_range(TILES):
        gl.store(own + t * SIZE, accs[t])
    gl.thread_barrier()
    start, stop = begin // share, (begin + groups - 1) // share
    last = gl.atomic_add(arrivals + tile * 2 + PART, 1, sem="acq_rel") == stop - start
    if last:
        gl.thread_barrier()
        accs = zeros(TILES, ROWS, MMA)
        for p in range(start, stop + 1):
            slot = p * 2 + (p == start).to(gl.int32)
            own = parts + slot.to(gl.int64) * (2 * TILES * SIZE) + cells
            sums = ()
            for t in gl.static_range(TILES):
                sums = sums + (accs[t] + gl.load(own + t * SIZE, cache_modifier=".cg"),)
            accs = sums
        gl.store(arrivals + tile * 2 + PART, 0)
    return accs, last


@gluon.jit
def compute(
    ends, rings, ys, bars, sizes, M,
    PART: gl.constexpr, INT8: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the PART-th half of the outputs of every tile of this program's run."""
    out, x_scale, bias, parts, arrivals = ends
    strips, N, groups, share, total = sizes
    OUTPUTS: gl.constexpr = rings[2].shape[1]
    TILES: gl.constexpr = OUTPUTS // 128
    ROWS: gl.constexpr = rings[0].shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32 if INT8 else 16]
    )
    first = gl.program_id(0) * share
    end = gl.minimum(first + share, total)
    for tile in range(first // groups, (end + groups - 1) // groups):
        low, high = gl.maximum(first, tile * groups), gl.minimum(end, tile * groups + groups)
        accs = zeros(TILES, ROWS, MMA)
        accs = multiply(accs, rings, bars, first, low, high, PART, MMA)
        last = True
        if high - low < groups:
            accs, last = sum_parts(accs, parts, arrivals, tile, low, high, groups, share, PART)
        if last:
            row = tile % strips * ROWS
            m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
            if INT8:
                sx = gl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0) * 0.0625
            for t in gl.static_range(TILES):
                column = tile // strips * OUTPUTS + (PART * TILES + t) * 64
                y = accs[t]
                if INT8:
                    y *= gl.expand_dims(sx, 0)
                if BIAS:
                    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
                    y += gl.expand_dims(gl.load(bias + n), 1)
                tma.store_wait(0)
                ys.index(PART).store(y.to(out.dtype).permute([1, 0]))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [row, column], ys.index(PART))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "groups", "strips", "share", "total"])
def w4_kernel(
    x, packed, scale, out, x_scale, bias, parts, arrivals, M, N, groups, strips, share, total,
    STAGES: gl.constexpr, INT8: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """x, packed (as [K / 128 * N / 2, 128 bytes]), scale (flat) and out are TMA descriptors."""
    CHUNKS: gl.constexpr = 1 if INT8 else 2
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * CHUNKS] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(packed.dtype, [STAGES] + packed.block_type.shape, packed.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES] + scale.block_type.shape, scale.layout)
    ys = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    rings, bars, sizes = (xs, ws, ss), (ready, empty), (strips, N, groups, share, total)
    ends = (out, x_scale, bias, parts, arrivals)
    LOW: gl.constexpr = 0
    HIGH: gl.constexpr = 1
    gl.warp_specialize(
        [
            (compute, (ends, rings, ys, bars, sizes, M, LOW, INT8, PER_ROW, BIAS)),
            (compute, (ends, rings, ys, bars, sizes, M, HIGH, INT8, PER_ROW, BIAS)),
            (load_tiles, (x, packed, scale, rings, bars, sizes, INT8)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def _launch(x, x_scale, weight, workspace: Workspace, out: Tensor, tile: Tile) -> None:
    """One program a tile (splits = 1), or an equal share of all for every SM."""
    (rows, inputs), outputs = x.shape, weight.scale.shape[1]
    integers = x.dtype == torch.int8
    require(outputs % tile.outputs == 0, f"{outputs} outputs are no multiple of {tile.outputs}")
    strips, groups = triton.cdiv(rows, tile.rows), inputs // GROUP
    tiles = strips * (outputs // tile.outputs)
    share = groups
    if tile.splits > 1:
        programs = min(multiprocessors(x.device), tiles * tile.splits)
        share = triton.cdiv(tiles * groups, programs)
        workspace.check(2 * programs * tile.outputs * tile.rows, 2 * tiles)
    words = weight.packed.view(-1, 128) if integers else weight.packed.view(-1, 32)
    w4_kernel[(triton.cdiv(tiles * groups, share),)](
        _describe(x, [tile.rows, 128 // x.itemsize]),
        _describe(words, [tile.outputs // 2, words.shape[1]]),
        _describe(weight.scale.view(-1), [tile.outputs]),
        _describe(out, [tile.rows, 64]),
        x_scale, weight.bias, workspace.parts, workspace.arrivals,
        rows, outputs, groups, strips, share, tiles * groups, STAGES=tile.stages, INT8=integers,
        PER_ROW=int(integers and x_scale.numel() > 1), BIAS=weight.bias is not None,
        REGISTERS=240, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A tensor for the TMA unit, in blocks; rows of 128 bytes are swizzled."""
    swizzle = 128 if len(block) > 1 else 0
    layout = gl.NVMMASharedLayout(swizzle, 8 * tensor.itemsize, len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)
