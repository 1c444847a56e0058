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
from kernels.triton.tuning import Tile, measured_tile, multiprocessors
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
def pieces(sizes):
    """How many tiles, or parts of tiles, this program works on."""
    strips, N, tiles, groups, cut, share = sizes
    first = gl.program_id(0) * share
    head, tail = first // groups, (gl.minimum(first + share, cut) + groups - 1) // groups
    whole = tiles - cut // groups - gl.program_id(0) + gl.num_programs(0) - 1
    return gl.maximum(tail - head, 0), gl.maximum(whole, 0) // gl.num_programs(0)


@gluon.jit
def piece(item, sizes):
    """The item-th: its tile, and the first and the end of its groups of inputs."""
    strips, N, tiles, groups, cut, share = sizes
    parts, _ = pieces(sizes)
    first = gl.program_id(0) * share
    tile = first // groups + item
    low = gl.maximum(first - tile * groups, 0)
    high = gl.minimum(gl.minimum(first + share, cut) - tile * groups, groups)
    whole = cut // groups + gl.program_id(0) + (item - parts) * gl.num_programs(0)
    is_part = item < parts
    tile = gl.where(is_part, tile, whole)
    return tile, gl.where(is_part, low, 0), gl.where(is_part, high, groups)


@gluon.jit
def load_tiles(x, packed, scale, rings, bars, sizes):
    """The warp of copies: fills the ring's stages as they are left."""
    xs, ws, ss = rings
    ready, empty, turns = bars
    strips, N, tiles, groups, cut, share = sizes
    STAGES: gl.constexpr = ws.shape[0]
    OUTPUTS: gl.constexpr = ss.shape[1]
    ROWS: gl.constexpr = xs.shape[1]
    CHUNKS: gl.constexpr = xs.shape[0] // STAGES
    i = gl.to_tensor(0)
    parts, whole = pieces(sizes)
    for item in range(parts + whole):
        tile, low, high = piece(item, sizes)
        column, row = tile // strips * OUTPUTS, tile % strips * ROWS
        for g in range(low, high):
            stage, bar = i % STAGES, ready.index(i % STAGES)
            mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
            mbarrier.expect(bar, packed.block_type.nbytes + scale.block_type.nbytes
                            + CHUNKS * x.block_type.nbytes)  # fmt: skip
            place = (g * (N // 64) + column // 64) * 32
            tma.async_copy_global_to_shared(packed, [place, 0], bar, ws.index(stage))
            tma.async_copy_global_to_shared(scale, [g * N + column], bar, ss.index(stage))
            for c in gl.static_range(CHUNKS):
                inputs = g * 128 + c * 64
                tma.async_copy_global_to_shared(x, [row, inputs], bar, xs.index(stage * CHUNKS + c))
            i += 1


@gluon.jit
def zeros(TILES: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr):
    """Accumulators of TILES tiles of 64 outputs."""
    accs = ()
    for _ in gl.static_range(TILES):
        accs = accs + (gl.full([64, ROWS], 0.0, gl.float32, layout=MMA),)
    return accs


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
def multiply_floats(
    accs, rings, bars, done, count, PART: gl.constexpr, TURNS: gl.constexpr, MMA: gl.constexpr
):
    """W4A16: add `count` groups, the ring's stages from `done` on; the scale multiplies the weight.

    The next operand is made while the last is multiplied. Nothing is on its way from one round of
    the loop to the next: the assembler would wait for every product. With TURNS the other warpgroup
    is half a round behind, and has the tensor cores meanwhile.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    DT: gl.constexpr = xs.dtype
    TILES: gl.constexpr = len(accs)
    STEPS: gl.constexpr = 2 * TILES
    STAGES: gl.constexpr = ws.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    stage = done % STAGES
    mbarrier.wait(ready.index(stage), done // STAGES & 1)
    words, scale = fetch(rings, stage, PART * TILES, MMA)
    w = gl.convert_layout(float_operand(words, scale, 0, DT), LEFT, assert_trivial=True)
    i = done
    for _ in range(count):
        following = (i + 1) % STAGES
        if TURNS:
            mbarrier.wait(turns.index(PART), (i + 1 - PART) & 1)
        for step in gl.static_range(STEPS):
            xt = xs.index(stage * 2 + step % 2).permute([1, 0])
            accs = put(accs, step // 2, warpgroup_mma(w, xt, accs[step // 2], is_async=True))
            if TURNS or step > 0:
                accs = wait(accs, 1)
            if TURNS and step == TILES:
                mbarrier.arrive(turns.index(1 - PART))
            if step == STEPS - 1:
                more = i + 1 < done + count
                mbarrier.wait(ready.index(following), (i + 1) // STAGES & 1, pred=more)
                words, scale = fetch(rings, following, PART * TILES, MMA)
            elif TURNS or step % 2 == 1:  # read again, the words keep the work behind the wait
                words, scale = fetch(rings, stage, PART * TILES + (step + 1) // 2, MMA)
            w = float_operand(words, scale, (step + 1) % 2, DT)
            w = gl.convert_layout(w, LEFT, assert_trivial=True)
        accs = wait(accs, 0)
        mbarrier.arrive(empty.index(stage))
        stage = following
        i += 1
    return accs


@gluon.jit
def multiply_integers(
    accs, rings, bars, done, count, PART: gl.constexpr, TURNS: gl.constexpr, MMA: gl.constexpr
):
    """W4A8: the scale multiplies a group's exact sum.

    The rows of x are taken in halves: the sum of one is scaled while the other is multiplied, which
    is also when the other warpgroup starts, so that the two do not both wait or both work.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    ROWS: gl.constexpr = accs[0].shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    TILES: gl.constexpr = len(accs) // HALVES
    STAGES: gl.constexpr = ws.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    zero = gl.full([64, ROWS], 0, gl.int32, layout=MMA)
    i = done
    for _ in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        for t in gl.static_range(TILES):
            packed, scale = fetch(rings, stage, PART * TILES + t, MMA)
            w = gl.convert_layout(int_operand(packed), LEFT, assert_trivial=True)
            if TURNS:
                mbarrier.wait(turns.index(PART), (i * TILES + t + 1 - PART) & 1)
            sums = ()
            for half in gl.static_range(HALVES):
                xt = xs.index(stage).slice(half * ROWS, ROWS).permute([1, 0])
                sums = sums + (warpgroup_mma(w, xt, zero, use_acc=False, is_async=True),)
            for half in gl.static_range(HALVES):
                sums = wait(sums, HALVES - 1 - half)
                if TURNS and half == 0:
                    mbarrier.arrive(turns.index(1 - PART))
                if half == HALVES - 1 and t == TILES - 1:
                    mbarrier.arrive(empty.index(stage))
                new = promote(accs[t * HALVES + half], sums[half], gl.expand_dims(scale, 1))
                accs = put(accs, t * HALVES + half, new)
        i += 1
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
def sum_parts(accs, parts, arrivals, tile, low, sizes, PART: gl.constexpr, PARTS: gl.constexpr):
    """Leave a cut tile's part; the last of its programs to arrive gets the sum of all, in order."""
    strips, N, tiles, groups, cut, share = sizes
    TILES: gl.constexpr = len(accs)
    MMA: gl.constexpr = accs[0].type.layout
    ROWS: gl.constexpr = accs[0].shape[1]
    SIZE: gl.constexpr = 64 * ROWS
    sums = ()
    for t in gl.static_range(TILES):
        sums = sums + (by_thread(accs[t]),)
    FLAT: gl.constexpr = sums[0].type.layout
    quad = gl.expand_dims(gl.arange(0, SIZE // 4, layout=gl.SliceLayout(1, FLAT)), 1)
    cells = quad * 4 + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, FLAT)), 0)
    cells += PART * TILES * SIZE
    slot = gl.program_id(0) * 2 + (low == 0).to(gl.int32)  # a run may cut its first and last tile
    own = parts + slot.to(gl.int64) * (PARTS * TILES * SIZE) + cells
    for t in gl.static_range(TILES):
        gl.store(own + t * SIZE, sums[t])
    gl.thread_barrier()
    start, stop = tile * groups // share, (tile * groups + groups - 1) // share
    place = arrivals + tile * PARTS + PART
    last = gl.atomic_add(place, 1, sem="acq_rel") == stop - start
    if last:
        gl.thread_barrier()
        for p in range(start, stop + 1):
            slot = p * 2 + (p == start).to(gl.int32)
            own = parts + slot.to(gl.int64) * (PARTS * TILES * SIZE) + cells
            more = ()
            for t in gl.static_range(TILES):
                more = more + (gl.load(own + t * SIZE, cache_modifier=".cg"),)
            added = ()
            for t in gl.static_range(TILES):
                added = added + (gl.where(p == start, 0.0, sums[t]) + more[t],)
            sums = added
        gl.store(place, 0)
        accs = ()
        for t in gl.static_range(TILES):
            y = sums[t].reshape([ROWS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
            y = gl.convert_layout(y.reshape([64, ROWS]), MMA, assert_trivial=True)
            accs = accs + (y,)
    return accs, last


@gluon.jit
def by_thread(acc):
    """Sums [64, ROWS] as [16 ROWS, 4]: four of a thread in a row, threads beside each other."""
    ROWS: gl.constexpr = acc.shape[1]
    y = acc.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return y.reshape([16 * ROWS, 4])


@gluon.jit
def compute(
    ends, rings, ys, bars, sizes, M,
    PART: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the PART-th share of the outputs of every tile of this program."""
    out, x_scale, bias, parts, arrivals = ends
    strips, N, tiles, groups, cut, share = sizes
    xs, ws, ss = rings
    INT8: gl.constexpr = xs.dtype == gl.int8
    PARTS: gl.constexpr = ys.shape[0]
    TILES: gl.constexpr = ss.shape[1] // 64 // PARTS
    ROWS: gl.constexpr = ys.shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    TURNS: gl.constexpr = PARTS == 2 and (HALVES == 2 if INT8 else TILES == 2 and ROWS > 64)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32 if INT8 else 16]
    )
    done = gl.to_tensor(0)
    some, whole = pieces(sizes)
    for item in range(some + whole):
        tile, low, high = piece(item, sizes)
        accs = zeros(TILES * HALVES, ROWS, MMA)
        if INT8:
            accs = multiply_integers(accs, rings, bars, done, high - low, PART, TURNS, MMA)
        else:
            accs = multiply_floats(accs, rings, bars, done, high - low, PART, TURNS, MMA)
        done += high - low
        last = True
        if high - low < groups:
            accs, last = sum_parts(accs, parts, arrivals, tile, low, sizes, PART, PARTS)
        if last:
            for k in gl.static_range(TILES * HALVES):
                row = (tile % strips * HALVES + k % HALVES) * ROWS
                column = tile // strips * (64 * PARTS * TILES) + (PART * TILES + k // HALVES) * 64
                y = accs[k]
                if INT8:
                    m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
                    sx = gl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0) * 0.0625
                    y *= gl.expand_dims(sx, 0)
                if BIAS:
                    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
                    y += gl.expand_dims(gl.load(bias + n), 1)
                tma.store_wait(0)
                ys.index(PART).store(y.to(out.dtype).permute([1, 0]))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [row, column], ys.index(PART))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "tiles", "groups", "strips", "cut", "share"])
def w4_kernel(
    x, packed, scale, out, x_scale, bias, parts, arrivals,
    M, N, tiles, groups, strips, cut, share,
    STAGES: gl.constexpr, PARTS: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """x, packed (as [K / 128 * N / 2, 128 bytes]), scale (flat) and out are TMA descriptors."""
    CHUNKS: gl.constexpr = 128 // x.block_type.shape[1]
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * CHUNKS] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(packed.dtype, [STAGES] + packed.block_type.shape, packed.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES] + scale.block_type.shape, scale.layout)
    ys = gl.allocate_shared_memory(out.dtype, [PARTS] + out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    rings, bars = (xs, ws, ss), (ready, empty, turns)
    sizes = (strips, N, tiles, groups, cut, share)
    ends = (out, x_scale, bias, parts, arrivals)
    A: gl.constexpr = 0
    B: gl.constexpr = 1
    C: gl.constexpr = 2
    D: gl.constexpr = 3
    if PARTS == 2:
        gl.warp_specialize(
            [
                (compute, (ends, rings, ys, bars, sizes, M, A, PER_ROW, BIAS)),
                (compute, (ends, rings, ys, bars, sizes, M, B, PER_ROW, BIAS)),
                (load_tiles, (x, packed, scale, rings, bars, sizes)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (ends, rings, ys, bars, sizes, M, A, PER_ROW, BIAS)),
                (compute, (ends, rings, ys, bars, sizes, M, B, PER_ROW, BIAS)),
                (compute, (ends, rings, ys, bars, sizes, M, C, PER_ROW, BIAS)),
                (compute, (ends, rings, ys, bars, sizes, M, D, PER_ROW, BIAS)),
                (load_tiles, (x, packed, scale, rings, bars, sizes)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


def w4a16_linear(
    x: Tensor, weight: W4A16Weight, workspace: Workspace, tile: Tile | None = None
) -> Tensor:
    """As `kernels.triton.w4a16.w4a16_linear`, to which it hands what it does not take.

    That is: devices other than sm_90, and what the device's table or the rule says is faster there.
    """
    tile = tile or _tile("w4a16", x, weight)
    if tile is None or not tile.persistent:
        return plain_w4a16_linear(x, weight, workspace, tile)
    require(
        x.dtype in (torch.float16, torch.bfloat16) and x.is_contiguous(),
        f"x is {x.dtype}; needed is contiguous float16 or bfloat16",
    )
    return _launch(x, None, weight, workspace, x.dtype, tile)


def w4a8_linear(
    xq: Tensor,
    x_scale: Tensor,
    weight: W4A8Weight,
    workspace: Workspace,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """As `kernels.triton.w4a8.w4a8_linear`, to which it hands what it does not take.

    That is: results of 32 bits, devices other than sm_90, and what is faster there.
    """
    tile = tile or (_tile("w4a8", xq, weight) if out_dtype.itemsize == 2 else None)
    if tile is None or not tile.persistent:
        return plain_w4a8_linear(xq, x_scale, weight, workspace, out_dtype, tile)
    require(
        xq.dtype == torch.int8 and xq.is_contiguous(),
        f"x is {xq.dtype}; needed is contiguous int8",
    )
    require(x_scale.numel() in (1, len(xq)), f"{x_scale.numel()} scales for {len(xq)} rows of x")
    require(out_dtype.itemsize == 2, f"results are {out_dtype}; this kernel writes 16 bits")
    return _launch(xq, x_scale, weight, workspace, out_dtype, tile)


def _tile(family: str, x: Tensor, weight: W4A16Weight | W4A8Weight) -> Tile | None:
    """Measured, or the rule; None where the plain kernel is to choose for itself."""
    rows, outputs = len(x), weight.scale.shape[1]
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) != (9, 0):
        return None
    found = measured_tile(f"{family}_many", x.device, rows, outputs, x.shape[1])
    return found or many_rows_rule(family, multiprocessors(x.device), rows, outputs)


def many_rows_rule(family: str, processors: int, rows: int, outputs: int) -> Tile | None:
    """Large tiles where they fill the SMs, else smaller ones that are cut; None for few rows."""
    floats = family == "w4a16"
    if rows <= (32 if floats else 64) or outputs % 128:
        return None
    if rows <= 64:
        large = outputs % 256 == 0 and outputs // 256 >= 0.8 * processors
        return Tile(256, 64, 1, 5, 16, True) if large else Tile(128, 64, 4, 6, 8, True)
    tiles = -(-rows // 128) * (outputs // 256)
    if outputs % 256 == 0 and tiles >= 0.8 * processors:
        return Tile(256, 128, 1, 3 if floats else 4, 8, True)
    return Tile(128, 128, 4, 4, 8, True)


def _launch(x, x_scale, weight, workspace: Workspace, dtype: torch.dtype, tile: Tile) -> Tensor:
    """Whole tiles in turn; where splits > 1, what is left after full rounds in equal runs."""
    (rows, inputs), (groups, outputs) = x.shape, weight.scale.shape
    require(inputs == groups * GROUP, f"x has {inputs} inputs, the weight {groups * GROUP}")
    require(
        outputs % tile.outputs == 0 and tile.warps in (8, 16),
        f"{tile} does not fit {outputs} outputs, or has not 8 or 16 warps",
    )
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    strips, processors, parts = triton.cdiv(rows, tile.rows), multiprocessors(x.device), tile.warps // 4
    tiles = strips * (outputs // tile.outputs)
    programs, cut, share = min(processors, tiles), 0, 1
    if tile.splits > 1 and tiles % processors:
        cut = tiles % processors * groups
        share = max(triton.cdiv(cut, processors), triton.cdiv(groups, tile.splits))
        programs = max(programs, triton.cdiv(cut, share))
        workspace.check(2 * programs * tile.outputs * tile.rows, parts * tiles)
    integers = x.dtype == torch.int8
    words = weight.packed.view(-1, 128 if integers else 32)
    w4_kernel[(programs,)](
        _describe(x, [tile.rows, 128 // x.itemsize]),
        _describe(words, [tile.outputs // 2, words.shape[1]]),
        _describe(weight.scale.view(-1), [tile.outputs]),
        _describe(out, [min(tile.rows, 64) if integers else tile.rows, 64]),
        x_scale, weight.bias, workspace.parts, workspace.arrivals,
        rows, outputs, tiles, groups, strips, cut, share, STAGES=tile.stages, PARTS=parts,
        PER_ROW=int(x_scale is not None and x_scale.numel() > 1), BIAS=weight.bias is not None,
        REGISTERS=240 if parts == 2 else 112, num_warps=4, maxnreg=168 if parts == 2 else 96,
    )  # fmt: skip
    return out


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A tensor for the TMA unit, in blocks; rows of 128 bytes are swizzled."""
    swizzle = 128 if len(block) > 1 else 0
    layout = gl.NVMMASharedLayout(swizzle, 8 * tensor.itemsize, len(block))
    return TensorDescriptor.from_tensor(tensor, block, layout)
