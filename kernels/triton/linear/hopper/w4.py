"""4-bit weights times many rows on Hopper: W4A16 and W4A8, warps with roles of their own (Gluon).

The sums and the packed weights are those of `kernels.triton.linear.weight_only` and
`kernels.triton.linear.w4a8` for groups of 128 inputs without zero points, and for scales of two
levels. Those kernels load, unpack and multiply in turn; here the three go on at once:

- One warp copies tiles of packed weights, scales and x by TMA into a ring in shared memory.
- Two warpgroups take half of a tile's outputs each. Packed words go from the ring to registers and
  become the left operand there; the tensor cores read the right one, x^T, from the ring.
- Products are asynchronous. W4A16 and W4A8 of two levels unpack the next operand while the last is
  multiplied; of W4A16 one is on its way all the time but for the first and last of a tile. Other
  W4A8 scales the exact sum of half of the rows while the other half is multiplied, and lets the
  other warpgroup start just then, so that the two do not both wait or both work.

There is at most one program an SM. It takes whole tiles in turn; the tiles that are left after full
rounds may be cut into equal runs of `share` (tile, group) pairs. Of a cut tile the programs leave
their parts, and the last to arrive adds them up, in order.

That is stream-K with whole tiles (Osama et al. 2023, arXiv 2301.03598, section 5.2): with fewer
tiles than programs, or a rest of tiles after full rounds, tiles * groups pairs are cut into equal
runs, so that no SM waits for others; whole tiles follow in turn. A run may cut its first and last
tile. What a kernel hands around as `sizes` is

    row_tiles   tiles of rows: tile t is of output tile t // row_tiles and row tile t % row_tiles
    N        outputs
    tiles    all of them
    groups   steps of the sum over inputs of a tile
    cut      pairs (tile, group) of the tiles that are cut, which come first
    share    of these, of a program
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
# pyright: reportOperatorIssue=false
# ruff: noqa: RUF005, RUF059  (the compiler knows no starred tuples, and unpacks only whole ones)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from kernels.triton.gluon_names import barrier, tma_load, tma_store, wait_ahead
from kernels.triton.linear.hopper.w4_sums import multiply_exact, multiply_floats, multiply_integers


@gluon.jit
def pieces(sizes):
    """How many tiles, or parts of tiles, this program works on."""
    row_tiles, N, tiles, groups, cut, share = sizes
    first = gl.program_id(0) * share
    head, tail = first // groups, (gl.minimum(first + share, cut) + groups - 1) // groups
    whole = tiles - cut // groups - gl.program_id(0) + gl.num_programs(0) - 1
    return gl.maximum(tail - head, 0), gl.maximum(whole, 0) // gl.num_programs(0)


@gluon.jit
def piece(item, sizes):
    """The item-th: its tile, and the first and the end of its groups of inputs."""
    row_tiles, N, tiles, groups, cut, share = sizes
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
def sum_parts(accs, parts, arrivals, tile, low, sizes, PART: gl.constexpr):
    """Leave a cut tile's part; the last of its programs to arrive gets the sum of all, in order."""
    row_tiles, N, tiles, groups, cut, share = sizes
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
    own = parts + slot.to(gl.int64) * (2 * TILES * SIZE) + cells
    for t in gl.static_range(TILES):
        gl.store(own + t * SIZE, sums[t])
    barrier()
    start, stop = tile * groups // share, (tile * groups + groups - 1) // share
    place = arrivals + tile * 2 + PART
    last = gl.atomic_add(place, 1, sem="acq_rel") == stop - start
    if last:
        barrier()
        for p in range(start, stop + 1):
            slot = p * 2 + (p == start).to(gl.int32)
            own = parts + slot.to(gl.int64) * (2 * TILES * SIZE) + cells
            added = ()
            for t in gl.static_range(TILES):
                more = gl.load(own + t * SIZE, cache_modifier=".cg")
                added = added + (gl.where(p == start, 0, sums[t]) + more,)
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
    """Sums [64, ROWS] as [16 ROWS, 4]: four of a thread in a row, threads beside each other.

    A thread of wgmma has outputs 16 a + 8 b + c and rows 8 j + 2 i + e of all b, j and e.
    """
    ROWS: gl.constexpr = acc.shape[1]
    y = acc.reshape([4, 2, 8, ROWS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return y.reshape([16 * ROWS, 4])


@gluon.jit
def load_tiles(x, packed, scale, rings, bars, sizes, OUTPUTS: gl.constexpr, GROUPS: gl.constexpr):
    """The warp of copies: fills the ring's stages as they are left. Whole rows have no scales.

    Where a stage is half a group, the weights and scales of both come with the first.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    row_tiles, N, tiles, groups, cut, share = sizes
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    CHUNKS: gl.constexpr = xs.shape[0] // STAGES
    PARTS: gl.constexpr = 128 // (xs.shape[2] * CHUNKS)  # stages that a group takes
    i = gl.to_tensor(0)
    parts, whole = pieces(sizes)
    for item in range(parts + whole):
        tile, low, high = piece(item, sizes)
        column, row = tile // row_tiles * OUTPUTS, tile % row_tiles * ROWS
        for g in range(low, high):
            for part in gl.static_range(PARTS):
                stage, bar = i % STAGES, ready.index(i % STAGES)
                mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
                if part == 0:
                    SCALES: gl.constexpr = scale.block_type.nbytes if GROUPS > 0 else 0
                    own: gl.constexpr = packed.block_type.nbytes + SCALES
                    mbarrier.expect(bar, own + CHUNKS * x.block_type.nbytes)
                    held = i // PARTS % ws.shape[0]
                    place = (g * (N // 64) + column // 64) * 32
                    tma_load(packed, [place, 0], bar, ws.index(held))
                    if GROUPS > 0:
                        place = (g * N + column) * GROUPS
                        tma_load(scale, [place], bar, ss.index(held))
                else:
                    mbarrier.expect(bar, CHUNKS * x.block_type.nbytes)
                for c in gl.static_range(CHUNKS):
                    inputs = g * 128 + (part * CHUNKS + c) * 64
                    to = xs.index(stage * CHUNKS + c)
                    tma_load(x, [row, inputs], bar, to)
                i += 1


@gluon.jit
def zeros(TILES: gl.constexpr, ROWS: gl.constexpr, dtype: gl.constexpr, MMA: gl.constexpr):
    """Accumulators of TILES tiles of 64 outputs."""
    accs = ()
    for _ in gl.static_range(TILES):
        accs = accs + (gl.full([64, ROWS], 0, dtype, layout=MMA),)
    return accs


@gluon.jit
def cut(acc, PIECE: gl.constexpr):
    """Sums [64, ROWS], ROWS a power of two times PIECE -> tuple of [64, PIECE]."""
    ROWS: gl.constexpr = acc.shape[1]
    if ROWS == PIECE:
        parts = (acc,)
    else:
        low, high = gl.split(acc.reshape([64, 2, ROWS // 2]).permute([0, 2, 1]))
        parts = cut(low, PIECE) + cut(high, PIECE)
    return parts


@gluon.jit
def compute(
    ends, rings, ys, bars, sizes, M,
    PART: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    OUTPUTS: gl.constexpr, EXACT: gl.constexpr, FP4: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the PART-th share of the outputs of every tile of this program."""
    out, x_scale, unit, bias, parts, arrivals = ends
    row_tiles, N, tiles, groups, shared, share = sizes
    xs, ws, ss = rings
    INT8: gl.constexpr = xs.dtype == gl.int8
    TILES: gl.constexpr = OUTPUTS // 128
    WHOLE: gl.constexpr = xs.shape[1]
    ROWS: gl.constexpr = min(WHOLE, 128) if EXACT else ys.shape[1] if INT8 else WHOLE
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32 if INT8 else 16]
    )
    done = gl.to_tensor(0)
    some, whole = pieces(sizes)
    for item in range(some + whole):
        tile, low, high = piece(item, sizes)
        accs = zeros(TILES * HALVES, ROWS, gl.int32 if EXACT else gl.float32, MMA)
        if EXACT:
            accs = multiply_exact(accs, rings, bars, done, high - low, PART, GROUPS, MMA)
        elif INT8:
            accs = multiply_integers(accs, rings, bars, done, high - low, PART, MMA)
        else:
            HALVES4: gl.constexpr = GROUPS if FP4 else 0
            accs = multiply_floats(accs, rings, bars, done, high - low, PART, HALVES4, MMA)
        done += high - low
        last = True
        if high - low < groups:
            accs, last = sum_parts(accs, parts, arrivals, tile, low, sizes, PART)
        if last:
            for k in gl.static_range(TILES * HALVES):
                row = (tile % row_tiles * HALVES + k % HALVES) * ROWS
                column = (tile // row_tiles * (2 * TILES) + PART * TILES + k // HALVES) * 64
                place = (row, column)
                if EXACT:
                    store_exact(accs[k], place, ends, ys.index(PART), M, PER_ROW, BIAS, GROUPS)
                else:
                    y = accs[k]
                    if INT8:
                        m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
                        sx = gl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0) * 0.0625
                        y *= gl.expand_dims(sx, 0)
                    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
                    if FP4:
                        y *= gl.expand_dims(gl.load(unit + n), 1)
                    if BIAS:
                        y += gl.expand_dims(gl.load(bias + n), 1)
                    store_pieces(y, place, out, ys, PART)
    tma.store_wait(0)


@gluon.jit
def store_exact(
    acc, place, ends, staged, M, PER_ROW: gl.constexpr, BIAS: gl.constexpr, GROUPS: gl.constexpr
):
    """Sums of 64 outputs to memory, scaled unless as integers, in pieces of as many rows as are
    staged."""
    out, x_scale, unit, bias, parts, arrivals = ends
    row, column = place
    PIECE: gl.constexpr = staged.shape[0]
    sums = cut(acc >> 4 if GROUPS == 0 else acc, PIECE)
    for k in gl.static_range(len(sums)):
        y = sums[k]
        if out.dtype != gl.int32:
            y = scaled(y, (row + k * PIECE, column), ends, M, PER_ROW, BIAS)
        store(y, (row + k * PIECE, column), out, staged)


@gluon.jit
def store_pieces(y, place, out, ys, PART: gl.constexpr):
    """Results of 64 outputs to memory, in turn through the places where they are staged."""
    row, column = place
    PIECE: gl.constexpr = ys.shape[1]
    PLACES: gl.constexpr = ys.shape[0] // 2
    some = cut(y, PIECE)
    for k in gl.static_range(len(some)):
        staged = ys.index(PART * PLACES + k % PLACES)
        store(some[k], (row + k * PIECE, column), out, staged, PLACES - 1)


@gluon.jit
def store(y, place, out, staged, LEFT: gl.constexpr = 0):
    """Results [64 outputs, rows] to memory, once all but LEFT before have left their places."""
    row, column = place
    tma.store_wait(LEFT)
    staged.store(y.to(out.dtype).permute([1, 0]))
    fence_async_shared()
    tma_store(out, [row, column], staged)


@gluon.jit
def scaled(exact, place, ends, M, PER_ROW: gl.constexpr, BIAS: gl.constexpr):
    """exact (sx unit) + bias of a piece of a tile, int32 [64 outputs, rows] -> fp32."""
    out, x_scale, unit, bias, parts, arrivals = ends
    row, column = place
    ROWS: gl.constexpr = exact.shape[1]
    m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, exact.type.layout))
    n = column + gl.arange(0, 64, layout=gl.SliceLayout(1, exact.type.layout))
    sx = gl.load(x_scale + m * PER_ROW, mask=m < M, other=0.0)
    y = exact.to(gl.float32) * (gl.expand_dims(sx, 0) * gl.expand_dims(gl.load(unit + n), 1))
    if BIAS:
        y += gl.expand_dims(gl.load(bias + n), 1)
    return y


@gluon.jit(do_not_specialize=["M", "N", "tiles", "groups", "row_tiles", "cut", "share"])
def w4_kernel(
    x, packed, scale, out, x_scale, unit, bias, parts, arrivals,
    M, N, tiles, groups, row_tiles, cut, share,
    STAGES: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
    EXACT: gl.constexpr, FP4: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """x, packed (as [K / 128 * N / 2, 128 bytes]), scale (flat) and out are TMA descriptors.

    EXACT is of two levels; GROUPS are those of 128 inputs, 0 if a row has one scale alone. FP4 is
    of e2m1 elements, whose scales are GROUPS words for 128 inputs.
    A stage has 128 inputs; of floats times more than 128 rows it has 64, so that there are enough.
    PLACES are those where a warpgroup stages results.
    """
    HALVED: gl.constexpr = x.block_type.shape[1] == 64 and x.block_type.shape[0] > 128
    CHUNKS: gl.constexpr = 1 if HALVED else 128 // x.block_type.shape[1]
    HELD: gl.constexpr = (STAGES + 1) // 2 if HALVED else STAGES
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * CHUNKS] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(packed.dtype, [HELD] + packed.block_type.shape, packed.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [HELD] + scale.block_type.shape, scale.layout)
    ys = gl.allocate_shared_memory(out.dtype, [2 * PLACES] + out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    wait_ahead(OVERLAP)
    rings, bars = (xs, ws, ss), (ready, empty, turns)
    sizes = (row_tiles, N, tiles, groups, cut, share)
    ends = (out, x_scale, unit, bias, parts, arrivals)
    OUTPUTS: gl.constexpr = packed.block_type.shape[0] * 2
    LOW: gl.constexpr = 0
    HIGH: gl.constexpr = 1
    gl.warp_specialize(
        [
            (compute, (ends, rings, ys, bars, sizes, M,
                       LOW, PER_ROW, BIAS, OUTPUTS, EXACT, FP4, GROUPS)),
            (compute, (ends, rings, ys, bars, sizes, M,
                       HIGH, PER_ROW, BIAS, OUTPUTS, EXACT, FP4, GROUPS)),
            (load_tiles, (x, packed, scale, rings, bars, sizes, OUTPUTS, GROUPS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
