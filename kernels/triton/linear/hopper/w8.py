"""W8A8, int8 or fp8, times many rows on Hopper: warps with roles of their own (Gluon).

The sums and the packed weights are those of `kernels.triton.linear.w8a8`. There is at most one
program an SM; it takes tiles in turn, in bands of BAND row tiles, so that both operands stay in
L2.

- One warp copies tiles of weights and x by TMA into a ring in shared memory.
- Two warpgroups take half of a tile's outputs each. The tensor cores read both operands from the
  ring, weights as the left one and x^T as the right, and products are asynchronous: those of a
  stage are on their way while the next is waited for.
- Scales are asked for before a tile's products, and results leave by TMA in pieces, while the ring
  fills with the next tile.

Sums of fp8 stay in the tensor cores, which keep about 14 bits, for SEGMENT runs of 128 inputs, if
that is not 0.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# ruff: noqa: RUF005, RUF059  (the compiler knows no starred tuples, and unpacks only whole ones)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from kernels.triton.gluon_names import tma_load, tma_store, wait_ahead
from kernels.triton.linear.hopper.w4 import cut, zeros
from kernels.triton.linear.hopper.w4_sums import put, wait


@gluon.jit
def place_of(item, sizes, BAND: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr):
    """First row and first output of a program's item-th tile: band by band, output by output."""
    row_tiles, N, tiles, groups = sizes
    tile = gl.program_id(0) + item * gl.num_programs(0)
    band = tiles // row_tiles * BAND
    first = tile // band * BAND
    inside, height = tile % band, gl.minimum(row_tiles - first, BAND)
    return (first + inside % height) * ROWS, inside // height * OUTPUTS


@gluon.jit
def count(sizes):
    """How many tiles this program takes."""
    row_tiles, N, tiles, groups = sizes
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def load_tiles(x, packed, rings, bars, sizes, BAND: gl.constexpr):
    """The warp of copies: fills the ring's stages as they are left. int8 weights lie in runs."""
    xs, ws = rings
    ready, empty = bars
    row_tiles, N, tiles, groups = sizes
    STAGES: gl.constexpr = ws.shape[0]
    i = gl.to_tensor(0)
    for item in range(count(sizes)):
        row, column = place_of(item, sizes, BAND, xs.shape[1], ws.shape[1])
        for g in range(groups):
            stage, bar = i % STAGES, ready.index(i % STAGES)
            mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
            mbarrier.expect(bar, packed.block_type.nbytes + x.block_type.nbytes)
            place = [g * N + column, 0] if packed.dtype == gl.int8 else [column, g * 128]
            tma_load(packed, place, bar, ws.index(stage))
            tma_load(x, [row, g * 128], bar, xs.index(stage))
            i += 1


@gluon.jit
def multiply(accs, rings, bars, done, runs, PART: gl.constexpr):
    """Add `runs` of 128 inputs, the ring's stages from `done` on."""
    xs, ws = rings
    ready, empty = bars
    ROWS: gl.constexpr = accs[0].shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    TILES: gl.constexpr = len(accs) // HALVES
    STAGES: gl.constexpr = ws.shape[0]
    i = done
    for _ in range(runs):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        for k in gl.static_range(len(accs)):
            w = ws.index(stage).slice((PART * TILES + k // HALVES) * 64, 64)
            xt = xs.index(stage).slice(k % HALVES * ROWS, ROWS).permute([1, 0])
            accs = put(accs, k, warpgroup_mma(w, xt, accs[k], is_async=True))
        accs = wait(accs, len(accs))  # the stage before is done with
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > done)
        i += 1
    accs = wait(accs, 0)
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
    return accs


@gluon.jit
def added(sums, more):
    """Sums of two tuples, one by one."""
    both = ()
    for k in gl.static_range(len(sums)):
        both = both + (sums[k] + more[k],)
    return both


@gluon.jit
def compute(
    ends, rings, ys, by_row, bars, sizes, M,
    PART: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    BAND: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the PART-th half of the outputs of every tile of this program."""
    out, x_scale, w_scale, bias = ends
    row_tiles, N, tiles, groups = sizes
    xs, ws = rings
    TILES: gl.constexpr = ws.shape[1] // 128
    ROWS: gl.constexpr = min(xs.shape[1], 128 if xs.dtype == gl.int8 else 256)  # of a product
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    SUM: gl.constexpr = gl.int32 if xs.dtype == gl.int8 else gl.float32
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32]
    )
    done = gl.to_tensor(0)
    for item in range(count(sizes)):
        row, column = place_of(item, sizes, BAND, xs.shape[1], ws.shape[1])
        scales = ask(row, column, ends, M, N, PART, PER_ROW, BIAS, xs.shape[1], TILES, MMA)
        accs = zeros(TILES * HALVES, ROWS, SUM, MMA)
        if SEGMENT == 0:
            accs = multiply(accs, rings, bars, done, groups, PART)
        else:
            for g in range(0, groups, SEGMENT):
                runs = gl.minimum(groups - g, SEGMENT)
                more = zeros(TILES * HALVES, ROWS, SUM, MMA)
                accs = added(accs, multiply(more, rings, bars, done + g, runs, PART))
        done += groups
        by_row.index(PART).store(scales[0])
        for k in gl.static_range(TILES * HALVES):
            sx = by_row.index(PART).slice(k % HALVES * ROWS, ROWS).load(gl.SliceLayout(0, MMA))
            y = accs[k]
            if out.dtype != gl.int32:
                y = y.to(gl.float32) * (gl.expand_dims(sx, 0) * scales[1 + k // HALVES])
                if BIAS:
                    y += scales[1 + TILES + k // HALVES]
            place = (row + k % HALVES * ROWS, column + (PART * TILES + k // HALVES) * 64)
            store(y.to(out.dtype), place, out, ys, PART, k, TILES * HALVES)
    tma.store_wait(0)


@gluon.jit
def ask(
    row, column, ends, M, N, PART: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    ROWS: gl.constexpr, TILES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Scales of a tile's rows, [ROWS], of 64 outputs each, [64, 1], and biases: on their way.

    A last tile may have 64 outputs more than there are: what it makes of them is not stored.
    """
    out, x_scale, w_scale, bias = ends
    m = row + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    asked = (gl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0),)
    n = column + PART * TILES * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    for t in gl.static_range(TILES):
        scale = gl.load(w_scale + n + t * 64, mask=n + t * 64 < N, other=0.0)
        asked = asked + (gl.expand_dims(scale, 1),)
    if BIAS:
        for t in gl.static_range(TILES):
            more = gl.load(bias + n + t * 64, mask=n + t * 64 < N, other=0.0)
            asked = asked + (gl.expand_dims(more, 1),)
    return asked


@gluon.jit
def store(y, place, out, ys, PART: gl.constexpr, NUMBER: gl.constexpr, NUMBERS: gl.constexpr):
    """The NUMBER-th results of 64 outputs to memory, a piece while the one before leaves."""
    row, column = place
    PIECE: gl.constexpr = ys.shape[1]
    PIECES: gl.constexpr = y.shape[1] // PIECE
    BUFFERS: gl.constexpr = min(ys.shape[0] // 2, PIECES * NUMBERS)
    parts = cut(y, PIECE)
    for k in gl.static_range(PIECES):
        staged = ys.index(PART * (ys.shape[0] // 2) + (NUMBER * PIECES + k) % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        staged.store(parts[k].permute([1, 0]))
        fence_async_shared()
        tma_store(out, [row + k * PIECE, column], staged)


@gluon.jit(do_not_specialize=["M", "N", "tiles", "groups", "row_tiles"])
def w8a8_many_kernel(
    x, packed, out, x_scale, w_scale, bias, M, N, tiles, groups, row_tiles,
    BAND: gl.constexpr, STAGES: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    SEGMENT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """x, packed (int8 as [K / 128 * N, 128], fp8 as [N, K]) and out are TMA descriptors."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(packed.dtype, [STAGES] + packed.block_type.shape, packed.layout)
    ys = gl.allocate_shared_memory(out.dtype, [4] + out.block_type.shape, out.layout)
    by_row = gl.allocate_shared_memory(
        gl.float32, [2] + x.block_type.shape[:1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    wait_ahead(OVERLAP)
    rings, bars = (xs, ws), (ready, empty)
    sizes = (row_tiles, N, tiles, groups)
    ends = (out, x_scale, w_scale, bias)
    LOW: gl.constexpr = 0
    HIGH: gl.constexpr = 1
    gl.warp_specialize(
        [
            (compute, (ends, rings, ys, by_row, bars, sizes, M,
                       LOW, PER_ROW, BIAS, BAND, SEGMENT)),
            (compute, (ends, rings, ys, by_row, bars, sizes, M,
                       HIGH, PER_ROW, BIAS, BAND, SEGMENT)),
            (load_tiles, (x, packed, rings, bars, sizes, BAND)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
