"""Which tiles of a product a program takes, and how cut tiles are summed (Gluon).

Stream-K with whole tiles (Osama et al. 2023, arXiv 2301.03598, section 5.2): with fewer tiles than
programs, or a rest of tiles after full rounds, tiles * groups pairs are cut into equal runs of
`share`, so that no SM waits for others; whole tiles follow in turn. A run may cut its first and
last tile. What a kernel hands around as `sizes` is

    row_tiles   tiles of rows: tile t is of output tile t // row_tiles and row tile t % row_tiles
    N        outputs
    tiles    all of them
    groups   steps of the sum over inputs of a tile
    cut      pairs (tile, group) of the tiles that are cut, which come first
    share    of these, of a program
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# ruff: noqa: RUF005, RUF059  (the compiler knows no starred tuples, and unpacks only whole ones)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.gluon_names import barrier


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
