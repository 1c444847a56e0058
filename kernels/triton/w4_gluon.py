"""4-bit weights times many rows on Hopper: W4A16 and W4A8, warps with roles of their own (Gluon).

The sums and the packed weights are those of `kernels.triton.weight_only` and `kernels.triton.w4a8`
for groups of 128 inputs without zero points. Those kernels load, unpack and multiply in turn; here
the three go on at once:

- One warp copies tiles of packed weights, scales and x by TMA into a ring in shared memory.
- Two warpgroups take half of a tile's outputs each. Packed words go from the ring to registers and
  become the left operand there; the tensor cores read the right one, x^T, from the ring.
- Products are asynchronous. W4A16 unpacks the next operand while the last is multiplied. W4A8
  scales the exact sum of half of the rows while the other half is multiplied, and lets the other
  warpgroup start just then, so that the two do not both wait or both work.

There is at most one program an SM. It takes whole tiles in turn; the tiles that are left after full
rounds may be cut into equal runs of `share` (tile, group) pairs. Of a cut tile the programs leave
their parts, and the last to arrive adds them up, in order.

Asynchronous products keep their registers. A product that is on its way from one round of a loop to
the next, or 8-bit operands that go round, make the assembler wait for every product or copy bytes.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# ruff: noqa: RUF005, RUF059  (the compiler knows no starred tuples, and unpacks only whole ones)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.runs_gluon import piece, pieces, sum_parts

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
    gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0]], _LANES, [[4, 0], [8, 0]], [], [32, 32])
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
    """Words [64 outputs, 16], doubled scales [64, 1] -> weights [64, 64], the CHUNK-th inputs."""
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
    left = warpgroup_mma_wait(LEFT, deps=accs)
    if len(accs) == 1:
        left = (left,)  # of one it gives no tuple
    return left


@gluon.jit
def fetch(rings, stage, TILE: gl.constexpr, MMA: gl.constexpr):
    """Packed weights and scales of 64 outputs of a stage, in registers."""
    xs, ws, ss = rings
    packed, scale = ws.index(stage).slice(TILE * 32, 32), ss.index(stage).slice(TILE * 64, 64)
    if xs.dtype == gl.int8:
        words = packed.load(BYTES)
        own = scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)
    else:
        words = packed.load(WORDS).reshape([2, 4, 8, 4, 4]).permute([1, 0, 2, 4, 3])
        words = words.reshape([64, 16])
        own = doubled(scale.load(gl.SliceLayout(1, words.type.layout)), xs.dtype)
    return words, own


@gluon.jit
def multiply_floats(accs, rings, bars, done, count, PART: gl.constexpr, MMA: gl.constexpr):
    """W4A16: add `count` groups, the ring's stages from `done` on; the scale multiplies the weight.

    A step is a product of 64 outputs and half a group; the last makes the next group's operand.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    DT: gl.constexpr = xs.dtype
    TILES: gl.constexpr = len(accs)
    STEPS: gl.constexpr = 2 * TILES
    STAGES: gl.constexpr = ws.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    i, stage = done, done % STAGES
    mbarrier.wait(ready.index(stage), done // STAGES & 1)
    words, scale = fetch(rings, stage, PART * TILES, MMA)
    w = gl.convert_layout(float_operand(words, scale, 0, DT), LEFT, assert_trivial=True)
    for _ in range(count):
        following = (i + 1) % STAGES
        for step in gl.static_range(STEPS):
            xt = xs.index(stage * 2 + step % 2).permute([1, 0])
            accs = put(accs, step // 2, warpgroup_mma(w, xt, accs[step // 2], is_async=True))
            if step > 0:
                accs = wait(accs, 1)
            if step == STEPS - 1:
                more = i + 1 < done + count
                mbarrier.wait(ready.index(following), (i + 1) // STAGES & 1, pred=more)
                words, scale = fetch(rings, following, PART * TILES, MMA)
            elif step % 2 == 1:
                words, scale = fetch(rings, stage, PART * TILES + (step + 1) // 2, MMA)
            w = float_operand(words, scale, (step + 1) % 2, DT)
            w = gl.convert_layout(w, LEFT, assert_trivial=True)
        accs = wait(accs, 0)
        mbarrier.arrive(empty.index(stage))
        stage = following
        i += 1
    return accs


@gluon.jit
def multiply_integers(accs, rings, bars, done, count, PART: gl.constexpr, MMA: gl.constexpr):
    """W4A8: the scale multiplies a group's exact sum, of each half of the rows."""
    xs, ws, ss = rings
    ready, empty, turns = bars
    ROWS: gl.constexpr = accs[0].shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    TILES: gl.constexpr = len(accs) // HALVES
    STAGES: gl.constexpr = ws.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    zero = gl.full([64, ROWS], 0, gl.int32, layout=MMA)
    i = done  # not the loop's own counter: a range from a carried number on is compiled as from 0
    for _ in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        for t in gl.static_range(TILES):
            packed, scale = fetch(rings, stage, PART * TILES + t, MMA)
            w = gl.convert_layout(int_operand(packed), LEFT, assert_trivial=True)
            if HALVES == 2:
                mbarrier.wait(turns.index(PART), (i * TILES + t + 1 - PART) & 1)
            sums = ()
            for half in gl.static_range(HALVES):
                xt = xs.index(stage).slice(half * ROWS, ROWS).permute([1, 0])
                sums = sums + (warpgroup_mma(w, xt, zero, use_acc=False, is_async=True),)
            for half in gl.static_range(HALVES):
                sums = wait(sums, HALVES - 1 - half)
                if HALVES == 2 and half == 0:
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
def compute(
    ends, rings, ys, bars, sizes, M,
    PART: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the PART-th share of the outputs of every tile of this program."""
    out, x_scale, bias, parts, arrivals = ends
    strips, N, tiles, groups, cut, share = sizes
    xs, ws, ss = rings
    INT8: gl.constexpr = xs.dtype == gl.int8
    TILES: gl.constexpr = ss.shape[1] // 128
    ROWS: gl.constexpr = ys.shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32 if INT8 else 16]
    )
    done = gl.to_tensor(0)
    some, whole = pieces(sizes)
    for item in range(some + whole):
        tile, low, high = piece(item, sizes)
        accs = zeros(TILES * HALVES, ROWS, MMA)
        if INT8:
            accs = multiply_integers(accs, rings, bars, done, high - low, PART, MMA)
        else:
            accs = multiply_floats(accs, rings, bars, done, high - low, PART, MMA)
        done += high - low
        last = True
        if high - low < groups:
            accs, last = sum_parts(accs, parts, arrivals, tile, low, sizes, PART)
        if last:
            for k in gl.static_range(TILES * HALVES):
                row = (tile % strips * HALVES + k % HALVES) * ROWS
                column = (tile // strips * (2 * TILES) + PART * TILES + k // HALVES) * 64
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
    STAGES: gl.constexpr, PER_ROW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """x, packed (as [K / 128 * N / 2, 128 bytes]), scale (flat) and out are TMA descriptors."""
    CHUNKS: gl.constexpr = 128 // x.block_type.shape[1]
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * CHUNKS] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(packed.dtype, [STAGES] + packed.block_type.shape, packed.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES] + scale.block_type.shape, scale.layout)
    ys = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    rings, bars = (xs, ws, ss), (ready, empty, turns)
    sizes = (strips, N, tiles, groups, cut, share)
    ends = (out, x_scale, bias, parts, arrivals)
    LOW: gl.constexpr = 0
    HIGH: gl.constexpr = 1
    gl.warp_specialize(
        [
            (compute, (ends, rings, ys, bars, sizes, M, LOW, PER_ROW, BIAS)),
            (compute, (ends, rings, ys, bars, sizes, M, HIGH, PER_ROW, BIAS)),
            (load_tiles, (x, packed, scale, rings, bars, sizes)),
        ],
        [4, 1],
        [240, 24],
    )
