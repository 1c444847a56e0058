"""What warps, and programs that share a sequence, leave of decode attention, added up (Gluon).

Part of `kernels.triton.attention.decode_hopper`.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.attention.gluon_operands import HIGH_UNIT, LOW_UNIT, LOWEST, finish
from kernels.triton.gluon_names import barrier


@gluon.jit
def merge_warps(m, l, acc, total, PACKED: gl.constexpr, PER_TOKEN: gl.constexpr):  # noqa: E741
    """(result [128, 8], maximum [8], sum [8]) of a program from those of its warps.

    With PACKED what int4 numbers have too much, units of two kinds and eights, is taken out; where
    tokens have no scales, `total` is the sum.
    """
    ROW: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    m_all = gl.max(m, 0)
    e = gl.exp2(m - gl.expand_dims(m_all, 0))
    o = gl.sum(acc * gl.expand_dims(e, 1), 0)
    if PACKED:
        total = gl.convert_layout(gl.sum(gl.max(total, 1) * e, 0), COLUMN)
        d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, ROW)), 1)
        unit = gl.where(d < 64, 1.0 / LOW_UNIT, 1.0 / HIGH_UNIT)
        o = o * unit - 8.0 * gl.expand_dims(total, 0)
    l_all = total if PACKED and not PER_TOKEN else gl.convert_layout(gl.sum(l * e, 0), COLUMN)
    return o, gl.convert_layout(m_all, COLUMN), l_all


@gluon.jit
def leave(
    o, m, l, out, rows, out_scale, unit, parts, arrivals, item, split, runs,  # noqa: E741
    GROUP: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store the result of a (sequence, KV head), or a run's part; the last adds up all runs."""
    ROW: gl.constexpr = o.type.layout
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, ROW)), 1)
    h = gl.arange(0, 8, layout=gl.SliceLayout(0, ROW))
    real = (gl.expand_dims(h, 0) + d * 0) < GROUP
    if runs == 1:
        y = o * gl.expand_dims(gl.where(l > 0, unit / l, 0.0), 0)
        cells = out + (rows + gl.expand_dims(h, 0)) * 128 + d
        gl.store(cells, finish(y, out, out_scale), mask=real)
    else:
        place = parts + (item * SPLITS + split).to(gl.int64) * (GROUP * 130)
        gl.store(place + gl.expand_dims(h, 0) * 128 + d, o, mask=real)
        gl.store(place + GROUP * 128 + h, m, mask=h < GROUP)
        gl.store(place + GROUP * 129 + h, l, mask=h < GROUP)
        barrier()
        if gl.atomic_add(arrivals + item, 1, sem="acq_rel") == runs - 1:
            barrier()
            place = parts + (item * SPLITS).to(gl.int64) * (GROUP * 130)
            combine(place, out + rows * 128, out_scale, unit, runs, GROUP, SPLITS, WARPS)
            gl.store(arrivals + item, 0)


@gluon.jit
def combine(
    parts, out, out_scale, unit, runs,
    GROUP: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add the runs' parts of one (sequence, KV head) in order and store the result."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    PADDED: gl.constexpr = 8 if GROUP > 4 else (4 if GROUP > 2 else GROUP)
    h = gl.arange(0, PADDED, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT)), 0)
    real = gl.expand_dims(h < GROUP, 1) & (d >= 0)
    cells = gl.expand_dims(h, 1) * 128 + d
    top = gl.full([PADDED], LOWEST, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(SPLITS):
        m = parts + i * (GROUP * 130) + GROUP * 128 + h
        some = (h < GROUP) & (i < runs)
        top = gl.maximum(top, gl.load(m, mask=some, other=LOWEST, cache_modifier=".cg"))
    l = gl.full([PADDED], 0.0, gl.float32, layout=gl.SliceLayout(1, LAYOUT))  # noqa: E741
    o = gl.full([PADDED, 128], 0.0, gl.float32, layout=LAYOUT)
    for i in gl.static_range(SPLITS):
        m = parts + i * (GROUP * 130) + GROUP * 128 + h
        some = (h < GROUP) & (i < runs)
        e = gl.exp2(gl.load(m, mask=some, other=LOWEST, cache_modifier=".cg") - top)
        l += gl.load(m + GROUP, mask=some, other=0.0, cache_modifier=".cg") * e  # noqa: E741
        own = real & (i < runs)
        part = parts + i * (GROUP * 130) + cells
        o += gl.load(part, mask=own, other=0.0, cache_modifier=".cg") * gl.expand_dims(e, 1)
    y = o * gl.expand_dims(gl.where(l > 0, unit / l, 0.0), 1)
    gl.store(out + cells, finish(y, out, out_scale), mask=real)
