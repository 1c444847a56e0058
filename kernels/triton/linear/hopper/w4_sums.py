"""The sums of 4-bit weights times many rows on Hopper, of one warpgroup (Gluon).

A ring's stage holds 128 inputs of a tile, or 64, x as [rows, inputs]. Its weights become the left
operand in registers; a sum of 64 outputs by the rows of an accumulator goes on over stages.

Asynchronous products keep their registers. A product that is on its way from one round of a loop to
the next but not when the loop is entered, or 8-bit operands that go round, make the assembler wait
for every product or copy bytes.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# ruff: noqa: RUF005, RUF059  (the compiler knows no starred tuples, and unpacks only whole ones)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.linear.hopper.w4_operands import (
    BYTES,
    WORDS,
    doubled,
    exact_operand,
    float_operand,
    fp4_operand,
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
def fetch_floats(rings, stage, TILE: gl.constexpr, FP4: gl.constexpr):
    """Packed weights of 64 outputs of a stage for float rows and, as `operand` takes them, scales.

    FP4 is how many words of scales an output has there, 0 for integers, which have a float.
    """
    xs, ws, ss = rings
    words = ws.index(stage).slice(TILE * 32, 32).load(WORDS).reshape([2, 4, 8, 4, 4])
    words = words.permute([1, 0, 2, 4, 3]).reshape([64, 16])
    OWN: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    if FP4 == 0:
        scale = (doubled(ss.index(stage).slice(TILE * 64, 64).load(OWN), xs.dtype),)
    elif FP4 == 1:
        scale = (ss.index(stage).slice(TILE * 64, 64).load(OWN),)
    else:
        first = ss.index(stage).slice(TILE * 128, 64).load(OWN)
        scale = (first, ss.index(stage).slice(TILE * 128 + 64, 64).load(OWN))
    return words, scale


@gluon.jit
def operand(words, scale, CHUNK: gl.constexpr, FP4: gl.constexpr, dtype: gl.constexpr):
    """Weights of 64 outputs and the CHUNK-th 64 inputs, times their scales."""
    if FP4 == 0:
        w = float_operand(words, scale[0], CHUNK, dtype)
    else:
        w = fp4_operand(words, scale, CHUNK, dtype)
    return w


@gluon.jit
def fetch(rings, stage, TILE: gl.constexpr, MMA: gl.constexpr):
    """W4A8: packed weights and scales of 64 outputs of a stage, in registers."""
    xs, ws, ss = rings
    packed, scale = ws.index(stage).slice(TILE * 32, 32), ss.index(stage).slice(TILE * 64, 64)
    return packed.load(BYTES), scale.load(gl.SliceLayout(1, MMA)).to(gl.float32)


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
def multiply_floats(
    accs, rings, bars, done, count, PART: gl.constexpr, FP4: gl.constexpr, MMA: gl.constexpr
):
    """W4A16: add `count` groups, after `done` others; the scale multiplies the weight.

    The first group is not in the loop, so that a product is on its way whenever a round starts:
    the assembler serializes products if that holds of some rounds only. The second warpgroup starts
    a group later, so that the two do not both store results while no product is on its way.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    LATE: gl.constexpr = xs.shape[1] > 64
    PARTS: gl.constexpr = 2 * ready.shape[0] // xs.shape[0]  # stages of the ring that a group takes
    i, end = done, done + count
    wait_for(ready, i * PARTS, True)
    words, scale = fetch_floats(rings, i % ws.shape[0], PART * len(accs), FP4)
    if LATE and PART == 1:
        mbarrier.wait(turns.index(0), 0)
    accs, words, scale = add_group(accs, words, scale, rings, bars, i, end, PART, FP4, True, MMA)
    if LATE and PART == 0:
        mbarrier.arrive(turns.index(0), pred=done == 0)
    i += 1
    for _ in range(count - 1):
        accs, words, scale = add_group(
            accs, words, scale, rings, bars, i, end, PART, FP4, False, MMA
        )
        i += 1
    accs = wait(accs, 0)
    mbarrier.arrive(empty.index((i * PARTS - 1) % empty.shape[0]))
    return accs


@gluon.jit
def wait_for(ready, i, pred):
    """Wait until the i-th filling of the ring's stages is there."""
    STAGES: gl.constexpr = ready.shape[0]
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1, pred=pred)


@gluon.jit
def add_group(
    accs, words, scale, rings, bars, i, end,
    PART: gl.constexpr, FP4: gl.constexpr, FIRST: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The i-th group, whose first words are at hand; ends with its last product on its way.

    A step is a product of 64 outputs and half a group, upon which the one ahead of it is done.
    """
    xs, ws, ss = rings
    ready, empty, turns = bars
    TILES: gl.constexpr = len(accs)
    LAST: gl.constexpr = 2 * TILES - 1
    STAGES: gl.constexpr = empty.shape[0]
    PARTS: gl.constexpr = 2 * STAGES // xs.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    for step in gl.static_range(LAST + 1):
        w = operand(words, scale, step % 2, FP4, xs.dtype)
        w = gl.convert_layout(w, LEFT, assert_trivial=True)
        if PARTS == 2 and step == 1:
            wait_for(ready, 2 * i + 1, True)
        xt = xs.index((2 * i + step % 2) % xs.shape[0]).permute([1, 0])
        accs = put(accs, step // 2, warpgroup_mma(w, xt, accs[step // 2], is_async=True))
        accs = wait(accs, 1)
        if step == 0 and not FIRST:
            mbarrier.arrive(empty.index((i * PARTS - 1) % STAGES))
        if PARTS == 2 and step == LAST:
            mbarrier.arrive(empty.index(2 * i % STAGES))
        if step == LAST:
            wait_for(ready, (i + 1) * PARTS, i + 1 < end)
            words, scale = fetch_floats(rings, (i + 1) % ws.shape[0], PART * TILES, FP4)
        elif step % 2 == 1:
            words, scale = fetch_floats(rings, i % ws.shape[0], PART * TILES + (step + 1) // 2, FP4)
    return accs, words, scale


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
