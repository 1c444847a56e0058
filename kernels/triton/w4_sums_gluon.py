"""The sums of 4-bit weights times many rows on Hopper, of one warpgroup (Gluon).

A ring's stage holds 128 inputs of a tile, x as [rows, inputs]. Its weights become the left operand
in registers; a sum of 64 outputs by the rows of an accumulator goes on over stages.

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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.w4_operands_gluon import (
    BYTES,
    WORDS,
    doubled,
    exact_operand,
    float_operand,
    int_operand,
    own_multipliers,
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
def fetch_exact(rings, stage, TILE: gl.constexpr, GROUPS: gl.constexpr):
    """Weights of 64 outputs of a stage, times their multipliers, in registers."""
    xs, ws, ss = rings
    packed = ws.index(stage).slice(TILE * 32, 32).load(BYTES)
    if GROUPS == 0:
        w = int_operand(packed)
    else:
        m = own_multipliers(ss.index(stage).slice(TILE * 64 * GROUPS, 64 * GROUPS), GROUPS)
        w = exact_operand(packed, m, GROUPS)
    return w


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
def multiply_exact(
    accs, rings, bars, done, count, PART: gl.constexpr, GROUPS: gl.constexpr, MMA: gl.constexpr
):
    """W4A8 of two levels: an operand is made while the last is multiplied, by 128 rows at a time.

    Between rounds of the loop no product is on its way but the other warpgroup's.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    ROWS: gl.constexpr = accs[0].shape[1]
    HALVES: gl.constexpr = xs.shape[1] // ROWS
    TILES: gl.constexpr = len(accs) // HALVES
    STAGES: gl.constexpr = ws.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    i = done
    for _ in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        for t in gl.static_range(TILES):
            w = fetch_exact(rings, stage, PART * TILES + t, GROUPS)
            w = gl.convert_layout(w, LEFT, assert_trivial=True)
            for k in gl.static_range(t * HALVES, (t + 1) * HALVES):
                xt = xs.index(stage).slice(k % HALVES * ROWS, ROWS).permute([1, 0])
                accs = put(accs, k, warpgroup_mma(w, xt, accs[k], is_async=True))
            if t > 0:
                accs = wait(accs, HALVES)
        accs = wait(accs, 0)
        mbarrier.arrive(empty.index(stage))
        i += 1
    return accs
