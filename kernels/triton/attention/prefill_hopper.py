"""Prefill attention of `kernels.triton.attention.prefill` with warps of different tasks (Gluon),
for Hopper.

    4 warps       turn pages of 8 or 4 bits into fp16 in shared memory, two pages deep
    2 x 4 warps   64 rows each: S = Q K^T, softmax, O += P V, by wgmma

So no warp of a product waits for a conversion, and while one half of the rows is in its softmax,
the other has the tensor cores. Barriers in shared memory say of each buffer that it is filled, and
that both halves have read it. D = 128 and 8 or 4 bits; the plain kernel is the twin, and takes all
else.

Of int4, a register of two numbers holds those of bytes 0 and 2 or of 1 and 3 of a word
(`halves_of`). They are stored as they stand: the channels of an int4 K, with those of q, and the
tokens of a page whose V is int4, in K as in V, lie in the order of `swapped`.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.op_inputs import AttentionInputs
from kernels.triton.attention.gluon_parts import (
    FP8,
    INT4,
    LIFT,
    TYPES,
    finish,
    halves_of,
    to_fp16,
)
from kernels.triton.attention.paged_cache import scale_kind
from kernels.triton.common import overlap
from kernels.triton.gluon_names import barrier, wait_ahead

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
HIDDEN = gl.constexpr(float("-inf"))
ROWS = gl.constexpr(128)  # of a program
DEEP = gl.constexpr(2)  # pages in shared memory


@gluon.jit
def sequence_of(tile, query_start, base, begin, end, QUERIES: gl.constexpr):
    """Of sequences begin .. end - 1 the last whose first tile is not after this one."""
    low, high = begin + tile * 0, end + tile * 0
    while high - low > 1:
        middle = (low + high) // 2
        start = gl.load(query_start + middle).to(gl.int32) - base
        if start // QUERIES + middle - begin > tile:
            high = middle
        else:
            low = middle
    return low


@gluon.jit
def tile_of(tile, query_start, decodes, S, QUERIES: gl.constexpr):
    """Of a tile of prompts: (sequence, its first row, its new tokens, the tile's first of these).

    The last is not less than the new tokens where there is no such tile.
    """
    base = gl.load(query_start + decodes).to(gl.int32)
    sequence = sequence_of(tile, query_start, base, decodes, S, QUERIES)
    start = gl.load(query_start + sequence).to(gl.int32)
    count = gl.load(query_start + sequence + 1).to(gl.int32) - start
    first = (tile - (start - base) // QUERIES - (sequence - decodes)) * QUERIES
    return sequence, start, count, first


@gluon.jit
def swapped(i, PACKED: gl.constexpr):
    """0, 2, 1, 3, 4, 6, 5, 7, ...: where int4 numbers lie that stand side by side; else i."""
    return (i // 4 * 4 + i % 2 * 2 + i // 2 % 2) if PACKED else i


@gluon.jit
def keys(raw, TYPE: gl.constexpr):
    """Words of a page of K as fp16 [64, 128], channels `swapped` for int4."""
    if TYPE == INT4:  # [token, word, high, odd, pair]
        k = halves_of(raw, True).permute([0, 2, 1, 3, 4]).reshape([64, 128])
    else:
        k = to_fp16(raw, TYPE == FP8).reshape([64, 128])
    return k


@gluon.jit
def values(raw, TYPE: gl.constexpr):
    """Words of a page of V as fp16 [128, 64], tokens `swapped` for int4."""
    if TYPE == INT4:
        v = halves_of(raw, True).permute([2, 0, 1, 3, 4]).reshape([128, 64])
    else:
        v = to_fp16(raw, TYPE == FP8).reshape([128, 64])
    return v


@gluon.jit
def convert(
    k_pages, v_pages, k_scale, v_scale, table, head, begin, end, length, ks, vs, scales, full,
    empty,
    HEADS: gl.constexpr, PER_TOKEN: gl.constexpr, K_TYPE: gl.constexpr, V_TYPE: gl.constexpr,
):  # fmt: skip
    """Fill the buffers with pages begin .. end - 1; the next page is on its way meanwhile."""
    K_ROW: gl.constexpr = 16 if K_TYPE == INT4 else 32  # words of a token's head
    V_ROWS: gl.constexpr = 64 if V_TYPE == INT4 else 128  # of 64 tokens of a channel or of two
    K_PAGE: gl.constexpr = 64 * K_ROW
    V_PAGE: gl.constexpr = 16 * V_ROWS
    LIFTED: gl.constexpr = LIFT / 16 if V_TYPE == INT4 else LIFT
    K_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // K_ROW, K_ROW // 4], [4, 1], [1, 0])
    V_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, K_LAYOUT))
    words = gl.arange(0, K_ROW, layout=gl.SliceLayout(0, K_LAYOUT))
    rows = swapped(rows, V_TYPE == INT4)
    k_place = gl.expand_dims(rows, 1) * K_ROW + gl.expand_dims(words, 0)
    rows = gl.arange(0, V_ROWS, layout=gl.SliceLayout(1, V_LAYOUT))
    words = gl.arange(0, 16, layout=gl.SliceLayout(0, V_LAYOUT))
    v_place = gl.expand_dims(rows, 1) * 16 + gl.expand_dims(words, 0)
    token = swapped(gl.arange(0, 64, layout=LINE), V_TYPE == INT4)
    page = gl.load(table + begin).to(gl.int64) * HEADS + head
    raw_k = gl.load(k_pages + page * K_PAGE + k_place)
    raw_v = gl.load(v_pages + page * V_PAGE + v_place)
    following = gl.load(table + gl.minimum(begin + 1, end - 1))
    if PER_TOKEN:
        of_k, of_v = gl.load(k_scale + page * 64 + token), gl.load(v_scale + page * 64 + token)
    for p in range(begin, end):
        slot, phase = (p - begin) % DEEP, (p - begin) // DEEP % 2
        k = keys(raw_k, K_TYPE)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        ks.index(slot).store(k)
        if PER_TOKEN:
            scales.index(slot).store(of_k.to(gl.float32))
            lifted = of_v.to(gl.float32) * LIFTED
            lifted = gl.where(p * 64 + token < length, lifted, 0.0)  # else it may be anything
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        page = following.to(gl.int64) * HEADS + head
        raw_k = gl.load(k_pages + page * K_PAGE + k_place)
        if PER_TOKEN:
            of_k, of_v = gl.load(k_scale + page * 64 + token), gl.load(v_scale + page * 64 + token)
        v = values(raw_v, V_TYPE)
        mbarrier.wait(empty.index(DEEP + slot), phase ^ 1)
        vs.index(slot).store(v)
        if PER_TOKEN:
            scales.index(DEEP + slot).store(lifted)
        fence_async_shared()
        mbarrier.arrive(full.index(DEEP + slot), count=1)
        raw_v = gl.load(v_pages + page * V_PAGE + v_place)
        following = gl.load(table + gl.minimum(p + 2, end - 1))


@gluon.jit
def attend(
    qs, ks, vs, scales, full, empty, out, out_scale, factor, unit, begin, whole, end, window,
    first, count, start, old, head, q, softmax_scale, sink_k, sink_v, line, half,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, V_TYPE: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """One half of the rows: 64 of them over pages begin .. end - 1, masked from `whole` on."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # noqa: E741
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    r = half * 64 + gl.arange(0, 64, layout=ROW)
    position = gl.expand_dims(old + first + r // GROUP, 1)
    place = swapped(gl.arange(0, 64, layout=gl.SliceLayout(0, S)), V_TYPE == INT4)
    place = gl.expand_dims(place, 0)
    m = gl.full([64], LOWEST, gl.float32, layout=ROW)
    l = gl.full([64], 0.0, gl.float32, layout=ROW)  # noqa: E741
    zero = gl.full([64, 64], 0.0, gl.float32, layout=S)
    o = gl.full([64, 128], 0.0, gl.float32, layout=O)
    if SINKS > 0:
        m, l, o = with_sinks(  # noqa: E741
            o, q, softmax_scale * LOG2_E, unit, window, first, count, start, old, head, half,
            sink_k, sink_v, line, HEADS, GROUP, SINKS,
        )  # fmt: skip
        m, l = gl.convert_layout(m, ROW), gl.convert_layout(l, ROW)  # noqa: E741
    for p in range(begin, end):
        i = p - begin
        slot, phase = i % DEEP, i // DEEP % 2
        mbarrier.wait(full.index(slot), phase)
        running = warpgroup_mma(
            qs.index(half), ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(running,))
        if PER_TOKEN:
            s = s * gl.expand_dims(scales.index(slot).load(gl.SliceLayout(0, S)), 0)
        mbarrier.arrive(empty.index(slot), count=1)
        s = hidden(s, p, whole, place, position, window, SINKS)
        top = gl.maximum(m, gl.max(s, 1) * factor)
        weights = gl.exp2(s * factor - gl.expand_dims(top, 1))
        shrink = gl.exp2(m - top)
        l = l * shrink + gl.sum(weights, 1)  # noqa: E741
        m = top
        o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, O)), 1)
        mbarrier.wait(full.index(DEEP + slot), phase)
        if PER_TOKEN:
            lifted = scales.index(DEEP + slot).load(gl.SliceLayout(0, S))
            weights = weights * gl.expand_dims(lifted, 0)
        left = gl.convert_layout(weights.to(qs.dtype), LEFT)
        running = warpgroup_mma(left, vs.index(slot).permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(running,))
        mbarrier.arrive(empty.index(DEEP + slot), count=1)
    share = gl.where(l > 0, unit / l, 0.0)
    y = o * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, O)), 1)
    r = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, O)), 0)
    _, cells, real = rows_of(r, first, count, start, head, HEADS, GROUP)
    cells = gl.expand_dims(cells, 1) + d
    gl.store(out + cells, finish(y, out, out_scale), mask=gl.expand_dims(real, 1) & (d >= 0))


@gluon.jit
def hidden(s, p, whole, place, position, window, SINKS: gl.constexpr):
    """Scores of page p, -inf where a row does not see the token at a place of it.

    All rows see all of the pages before `whole`, but for sink tokens.
    """
    masked = p >= whole
    if SINKS > 0:
        masked = masked | (p == 0)
    if masked:
        token = p * 64 + place
        seen = (token <= position) & (token > position - window)
        if SINKS > 0:
            seen = seen & (token >= SINKS)
        s = gl.where(seen, s, HIDDEN)
    return s


@gluon.jit
def rows_of(r, first, count, start, head, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Of rows r of a tile: (query, where it begins in `q` and in `out`, whether there is one)."""
    query = first + r // GROUP
    real = (query < count) & (r < ROWS // GROUP * GROUP)
    cells = ((start + query).to(gl.int64) * HEADS + head) * GROUP + r % GROUP
    return query, cells * 128, real


@gluon.jit
def with_sinks(
    o, q, factor, unit, window, first, count, start, old, head, half, sink_k, sink_v, line,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """(m, l, o) of half of the rows after the sink tokens, in fp32.

    `kernels.triton.attention.prefill.with_sinks` in the layouts of this kernel; `unit` is what
    the result will be multiplied by.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    r = half * 64 + gl.arange(0, 64, layout=ROW)
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, o.type.layout))
    query, cells, real = rows_of(r, first, count, start, head, HEADS, GROUP)
    cells, real = gl.expand_dims(cells, 1) + gl.expand_dims(d, 0), gl.expand_dims(real, 1)
    x = gl.load(q + cells, mask=real & (cells >= 0), other=0.0).to(gl.float32)
    m = gl.full([64], LOWEST, gl.float32, layout=ROW)
    l = gl.full([64], 0.0, gl.float32, layout=ROW)  # noqa: E741
    for n in gl.static_range(SINKS):
        place = (line * SINKS + n) * 128 + d
        k, v = gl.load(sink_k + place).to(gl.float32), gl.load(sink_v + place).to(gl.float32)
        s = gl.sum(x * gl.expand_dims(k, 0), 1) * factor
        s = gl.where((n <= old + query) & (n > old + query - window), s, HIDDEN)
        top = gl.maximum(m, s)
        shrink, weights = gl.exp2(m - top), gl.exp2(s - top)
        l = l * shrink + weights  # noqa: E741
        o = o * gl.expand_dims(shrink, 1)
        o += gl.expand_dims(weights, 1) * gl.expand_dims(v / unit, 0)
        m = top
    return m, l, o


@gluon.jit
def load_queries(
    q, qs, first, count, start, head,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K_TYPE: gl.constexpr,
):  # fmt: skip
    """A tile's queries, rows query (r // GROUP), head (r % GROUP), to shared memory in fp16."""
    BYTES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # 16 a thread
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, BYTES)), 0)
    for half in gl.static_range(2):
        r = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, BYTES))
        _, cells, real = rows_of(r, first, count, start, head, HEADS, GROUP)
        real = gl.expand_dims(real, 1) & (d >= 0)
        x = gl.load(q + gl.expand_dims(cells, 1) + d, mask=real, other=0.0)
        if K_TYPE == INT4:
            x = x.reshape([64, 32, 2, 2]).permute([0, 1, 3, 2]).reshape([64, 128])
        qs.index(half).store(x.to(gl.float16))


@gluon.jit(do_not_specialize=["decodes", "S", "window", "width"])
def prefill_kernel(
    q, k_pages, v_pages, tables, query_start, lengths, k_scale, v_scale, out, out_scale,
    softmax_scale, decodes, S, window, width, sink_k, sink_v,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PER_TOKEN: gl.constexpr, K_TYPE: gl.constexpr,
    V_TYPE: gl.constexpr, SINKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Program (KV head, tile of queries), as the plain one; the cache is given as int32 words."""
    QUERIES: gl.constexpr = ROWS // GROUP
    wait_ahead(OVERLAP)
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    sequence, start, count, first = tile_of(tile, query_start, decodes, S, QUERIES)
    if first >= count:
        return
    length = gl.load(lengths + sequence).to(gl.int32)
    old = length - count
    begin = gl.maximum(old + first + 1 - window, 0) // 64
    whole = gl.where(old + first + QUERIES > window, begin, (old + first + 1) // 64)
    end = (old + gl.minimum(first + QUERIES, count) + 63) // 64
    factor, unit = softmax_scale * LOG2_E, 1.0 / LIFT
    if V_TYPE == INT4:
        unit = 16.0 / LIFT
    if not PER_TOKEN:
        factor *= gl.load(k_scale + head)
        unit = gl.load(v_scale + head)
    line = gl.load(tables + sequence * width).to(gl.int64) * HEADS + head

    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float16)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(gl.float16, [2, 64, 128], HALF)
    ks = gl.allocate_shared_memory(gl.float16, [DEEP, 64, 128], HALF)
    vs = gl.allocate_shared_memory(gl.float16, [DEEP, 128, 64], COLUMNS)
    scales = gl.allocate_shared_memory(gl.float32, [2 * DEEP, 64], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2 * DEEP, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * DEEP, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * DEEP):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    load_queries(q, qs, first, count, start, head, HEADS, GROUP, K_TYPE)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (attend, (qs, ks, vs, scales, full, empty, out, out_scale, factor, unit, begin, whole,
                      end, window, first, count, start, old, head, q, softmax_scale, sink_k,
                      sink_v, line, 0, HEADS, GROUP, PER_TOKEN, V_TYPE, SINKS)),
            (attend, (qs, ks, vs, scales, full, empty, out, out_scale, factor, unit, begin, whole,
                      end, window, first, count, start, old, head, q, softmax_scale, sink_k,
                      sink_v, line, 1, HEADS, GROUP, PER_TOKEN, V_TYPE, SINKS)),
            (convert, (k_pages, v_pages, k_scale, v_scale, tables + sequence * width, head, begin,
                       end, length, ks, vs, scales, full, empty, HEADS, PER_TOKEN, K_TYPE,
                       V_TYPE)),
        ],
        [4, 4],
        [192, 120],  # registers a thread; the first half has 504 less these
    )  # fmt: skip


def launch(
    q: Tensor,
    inputs: AttentionInputs,
    decodes: int,
    window: int,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """Run the kernel on what `kernels.triton.attention.prefill.prefill_attention` has checked."""
    pool, sequences, heads = inputs.pool, len(inputs.context_len), inputs.pool.k.shape[1]
    group = q.shape[1] // heads
    tiles = (q.shape[0] - decodes) // (ROWS.value // group) + sequences - decodes
    prefill_kernel[(heads, tiles)](
        q, pool.k.view(torch.int32), pool.v.view(torch.int32), inputs.block_tables,
        inputs.query_start, inputs.context_len, pool.k_scale, pool.v_scale, out, out_scale,
        inputs.softmax_scale, decodes, sequences, window, inputs.block_tables.shape[1],
        pool.sink_k, pool.sink_v, HEADS=heads, GROUP=group, PER_TOKEN=scale_kind(pool) == 3,
        K_TYPE=TYPES[pool.k.dtype], V_TYPE=TYPES[pool.v.dtype], SINKS=pool.sink_tokens, num_warps=4,
        enable_fp_fusion=True, **overlap(early=False),
    )  # fmt: skip
