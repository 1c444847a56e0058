"""Decode attention of `kernels.triton.attention.decode` with register layouts stated: 8 or 4 bits,
D = 128.

Every warp owns whole pages with a running maximum, sum and result of its own: no shared memory and
no barrier in the loop; warps are merged once, at the end. What makes that possible:

- K and V go from memory to the tensor cores' operand registers by loads of 16 bytes a thread. The
  order of the summed dimension is free as long as both operands share it: q is loaded in the order
  in which a thread's 16 bytes of K hold channels, and the rows of S^T stand for tokens in the order
  in which a thread's 16 bytes of V hold them (`token_of`).
- S^T = K q^T and O^T = V^T P^T, so that the dimension that is padded to 8 is the queries of a KV
  head. P^T turns from a sum into an operand by transposing 8 x 8 blocks inside the warp.
- The next page of K is on its way to registers before this page's V is used; of int4, whose pages
  take half the registers, so is the next page of V, and scales of tokens.
- int4 goes to the tensor cores as its bits stand, n + 8 in two units (`gluon_parts`). Where a
  head has one scale, what the eights add to scores is one number a query, which the softmax does
  not see; else a product with a K of nothing but eights tells it (`eights`). What they add to the
  result is 8 times the sum of the weights as they are rounded, which a product with ones tells.

The kernel of `kernels.triton.attention.decode`, whose launcher chooses, is the plain twin, and
takes what this one does not. The results of the two differ by the rounding of fp32 sums.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.op_inputs import AttentionInputs
from kernels.triton.attention.gluon_parts import (
    HIGH_UNIT,
    INT4,
    LIFT,
    LOW_UNIT,
    LOWEST,
    TYPES,
    eights,
    keys,
    leave,
    merge_warps,
    queries,
    scale_words,
    span,
    token_of,
    transposed,
    two_scales,
    values,
)
from kernels.triton.attention.paged_cache import scale_kind
from kernels.triton.common import Workspace, overlap
from kernels.triton.gluon_names import wait_ahead
from kernels.triton.tuning import KVSplit

LOG2_E = gl.constexpr(1.4426950408889634)
LIFTED_BITS = gl.constexpr(4.0)  # weights with scales of int4, and their sum, times 2^4
PREFETCH = gl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %laneid;
setp.eq.u32 first, t, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0; }""")


@gluon.jit
def prefetch(places, WORDS: gl.constexpr):
    """Ask for so many words at each warp's pointer to be brought into L2."""
    gl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [places, WORDS * 4], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["width"])
def decode_kernel(
    q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, out_scale, parts, arrivals,
    softmax_scale, width, sink_k, sink_v,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, LEAST: gl.constexpr,
    PER_TOKEN: gl.constexpr, K_TYPE: gl.constexpr, V_TYPE: gl.constexpr, SINKS: gl.constexpr,
    WARPS: gl.constexpr, K_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr, OVERLAP: gl.constexpr,
    METADATA_READY: gl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); the cache is given as int32 words.

    A split takes `LEAST` pages or more, so that the splits of a short sequence are few.
    """
    split, head, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    K_ROW: gl.constexpr = 16 if K_TYPE == INT4 else 32  # words of a token's head
    V_ROWS: gl.constexpr = 64 if V_TYPE == INT4 else 128  # of 64 tokens of a channel or of two
    if not METADATA_READY:
        wait_ahead(OVERLAP)
    length = gl.load(lengths + sequence).to(gl.int32)
    pages = (length + 63) // 64
    share = gl.maximum((pages + SPLITS - 1) // SPLITS, LEAST)
    runs = gl.maximum((pages + share - 1) // share, 1)
    if split >= runs:
        return
    first = split * share
    end = gl.minimum(first + share, pages)
    table = tables + sequence * width
    page = page_of(table, first, width, head, WARPS, HEADS, K_LAYOUT)
    row = span(64, K_LAYOUT, 1)
    k_lane = token_of(row & 7, V_TYPE == INT4) * K_ROW + span(K_ROW, K_LAYOUT, 2)
    k_more = token_of(row & 56, V_TYPE == INT4) * K_ROW  # the same in all lanes: a constant
    row = span(V_ROWS, V_LAYOUT, 1)
    v_lane, v_more = (row & 7) * 16 + span(16, V_LAYOUT, 2), (row & 120) * 16
    if METADATA_READY:
        if OVERLAP:  # L2 is where the page of the new token is written, too
            prefetch(k_pages + page.to(gl.int64) * (64 * K_ROW), 64 * K_ROW)
            prefetch(v_pages + page.to(gl.int64) * (16 * V_ROWS), 16 * V_ROWS)
        wait_ahead(OVERLAP)
    raw_k = words_of(k_pages, page, k_lane, k_more)
    rows = (sequence * HEADS + head) * GROUP
    qt = queries(q, rows, GROUP, WARPS, K_TYPE, MMA)
    factor = softmax_scale * LOG2_E
    if K_TYPE == INT4:
        factor *= 1.0 / (4.0 * LOW_UNIT)
    if not PER_TOKEN:
        factor *= gl.load(k_scale + head)
    m = gl.full([WARPS, 8], LOWEST, gl.float32, layout=gl.SliceLayout(1, MMA))
    l = gl.full([WARPS, 8], 0.0, gl.float32, layout=gl.SliceLayout(1, MMA))  # noqa: E741
    acc = gl.full([WARPS, 128, 8], 0.0, gl.float32, layout=MMA)
    total = gl.full([WARPS, 16, 8], 0.0, gl.float32, layout=MMA)
    none = gl.full([WARPS, 64, 8], 0.0, gl.float32, layout=MMA)  # what scores begin with
    if PER_TOKEN and K_TYPE == INT4:
        more = mma_v2(eights(WARPS, MMA), qt, total)
        none -= gl.expand_dims(gl.max(more, 1), 1)
    unit = 1.0 / LIFT
    if V_TYPE == INT4:
        unit = 1.0
    if not PER_TOKEN:
        unit = gl.load(v_scale + head)
    if SINKS > 0:  # noqa: SIM102  (known when compiled; the other is not)
        if split == 0:
            line = gl.load(table).to(gl.int64) * HEADS + head
            m, l, acc = with_sinks(  # noqa: E741
                m, l, acc, q, rows, softmax_scale * LOG2_E, unit, length, sink_k, sink_v, line,
                GROUP, V_TYPE, SINKS,
            )  # fmt: skip
    raw_v, of_k, of_v = page, page, page
    if PER_TOKEN and V_TYPE == INT4:
        of_k, of_v = scale_words(k_scale, page, MMA), scale_words(v_scale, page, MMA)
    if V_TYPE == INT4:
        raw_v = words_of(v_pages, page, v_lane, v_more)
    for p in range(first, end, WARPS):
        m, l, acc, total, page, raw_k, raw_v, of_k, of_v = attend(  # noqa: E741
            m, l, acc, total, page, raw_k, raw_v, of_k, of_v, qt, none, factor, p, end, length,
            table, width, head, k_lane, k_more, v_lane, v_more, k_pages, v_pages, k_scale, v_scale,
            HEADS, PER_TOKEN, K_TYPE, V_TYPE, SINKS,
        )  # fmt: skip
    o, m_all, l_all = merge_warps(m, l, acc, total, V_TYPE == INT4, PER_TOKEN)
    leave(
        o, m_all, l_all, out, rows, out_scale, unit, parts, arrivals, sequence * HEADS + head,
        split, runs, GROUP, SPLITS, WARPS,
    )  # fmt: skip


@gluon.jit
def with_sinks(
    m, l, acc, q, rows, factor, unit, length, sink_k, sink_v, line,  # noqa: E741
    GROUP: gl.constexpr, V_TYPE: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """(m, l, acc) of the first split once its warps have seen the sink tokens, in fp32.

    `kernels.triton.attention.decode.with_sinks` in the layouts and units of this kernel: each
    warp takes a token, or every WARPS-th; `unit` is what the result will be multiplied by.
    """
    MMA: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = acc.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, ROW)), 1)
    member, channel = span(8, MMA, 2) + span(WARPS, MMA, 0) * 0, span(128, MMA, 1)
    x = gl.load(q + (rows + member) * 128 + channel, mask=member < GROUP, other=0.0)
    lift = 1.0
    if V_TYPE == INT4:
        unit = gl.where(channel < 64, 1.0 / LOW_UNIT, 1.0 / HIGH_UNIT)
        lift = 16.0  # 2^LIFTED_BITS
    for first in gl.static_range(0, SINKS, WARPS):
        n = gl.minimum(first + warp, SINKS - 1)
        place = (line * SINKS + gl.expand_dims(n, 1)) * 128 + channel
        k, v = gl.load(sink_k + place).to(gl.float32), gl.load(sink_v + place).to(gl.float32)
        own = (first + warp < SINKS) & (n < length)
        s = gl.where(own, gl.sum(x.to(gl.float32) * k, 1) * factor, LOWEST)
        top = gl.maximum(m, s)
        shrink, weights = gl.exp2(m - top), gl.where(own, gl.exp2(s - top) * lift, 0.0)
        l = l * shrink + weights  # noqa: E741
        acc = acc * gl.expand_dims(shrink, 1) + gl.expand_dims(weights, 1) * (v / unit)
        m = top
    return m, l, acc


@gluon.jit
def attend(
    m, l, acc, total, page, raw_k, raw_v, of_k, of_v, qt, none, factor, p, end,  # noqa: E741
    length, table, width, head, k_lane, k_more, v_lane, v_more, k_pages, v_pages, k_scale,
    v_scale,
    HEADS: gl.constexpr, PER_TOKEN: gl.constexpr, K_TYPE: gl.constexpr, V_TYPE: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Each warp attends to its page; its next page, and K of that, are on their way meanwhile.

    Args:
        m, l, acc: Running maximum, sum [WARPS, 8] and result [WARPS, 128, 8] so far.
        total: Sum of the weights of V as they are rounded, [WARPS, 16, 8], for int4; rows alike.
        page: Each warp's page times heads, whose K is in `raw_k`.
        raw_k: Its words of K.
        raw_v: Its words of V, for int4.
        of_k, of_v: Words of its tokens' scales, of int4, where tokens have them.
        qt: Queries, fp16 [WARPS, 128, 8].
        none: What scores begin with, less what the eights of an int4 K add: [WARPS, 64, 8].
        factor: Of scores.
        p: The first warp's page within the sequence.
        end: The page that the run ends before.
        length: Tokens of the sequence.
        table: The sequence's block table, `width` entries.
        head: The KV head.
        k_lane, k_more, v_lane, v_more: Where a page's words of K and of V lie in it, in two parts.

    Returns:
        (m, l, acc, total, page, raw_k, raw_v, of_k, of_v) for the next page.
    """
    MMA: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = acc.shape[0]
    K_LAYOUT: gl.constexpr = k_lane.type.layout
    token = token_of(span(64, MMA, 1), V_TYPE == INT4)
    words_v = raw_v if V_TYPE == INT4 else words_of(v_pages, page, v_lane, v_more)
    if PER_TOKEN and V_TYPE != INT4:
        scales = gl.convert_layout(page, MMA) * 64 + token
    page = page_of(table, p + WARPS, width, head, WARPS, HEADS, K_LAYOUT)
    s = mma_v2(keys(raw_k, K_TYPE, MMA), qt, none)
    raw_k = words_of(k_pages, page, k_lane, k_more)
    times = factor
    if PER_TOKEN and V_TYPE == INT4:
        times = two_scales(of_k, MMA) * factor
        lifted = two_scales(of_v, MMA)
        of_k, of_v = scale_words(k_scale, page, MMA), scale_words(v_scale, page, MMA)
    elif PER_TOKEN:
        s = s * gl.load(k_scale + scales).to(gl.float32)
    seen = seen_of((p + span(WARPS, MMA, 0)) * 64 + token, length, end, SINKS)
    s = gl.where(seen, s * times, LOWEST)
    top, l, shrink, weights = softmax_step(m, l, s, PER_TOKEN, V_TYPE)  # noqa: E741
    if PER_TOKEN and V_TYPE == INT4:
        weights = weights * gl.where(seen, lifted, 0.0)  # of a token nobody wrote: anything
    elif PER_TOKEN:
        weights = weights * (gl.load(v_scale + scales).to(gl.float32) * LIFT)
        weights = gl.where(seen, weights, 0.0)
    acc, total = with_values(acc, total, words_v, weights, gl.expand_dims(shrink, 1), V_TYPE)
    if V_TYPE == INT4:
        raw_v = words_of(v_pages, page, v_lane, v_more)
    return top, l, acc, total, page, raw_k, raw_v, of_k, of_v


@gluon.jit
def page_of(
    table, p, width, head, WARPS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Numbers times heads, plus the head, of the WARPS pages from the p-th on: a page a warp."""
    following = gl.minimum(p + span(WARPS, LAYOUT, 0), width - 1)
    return gl.load(table + following).to(gl.int32) * HEADS + head


@gluon.jit
def words_of(pages, page, lane, more):
    """Words of each warp's page, whose places in it are given in two parts."""
    SIZE: gl.constexpr = lane.shape[1] * lane.shape[2]
    start = gl.convert_layout(page, lane.type.layout).to(gl.int64) * SIZE
    return gl.load(pages + (start + lane) + more)


@gluon.jit
def seen_of(at, length, end, SINKS: gl.constexpr):
    """Whether tokens of a run that ends before page `end` are there, and no sink tokens."""
    seen = at < gl.minimum(length, end * 64)
    if SINKS > 0:
        seen = seen & (at >= SINKS)
    return seen


@gluon.jit
def softmax_step(m, l, s, PER_TOKEN: gl.constexpr, V_TYPE: gl.constexpr):  # noqa: E741
    """(maximum, sum, what sums so far are multiplied by, weights) after scores s."""
    top = gl.maximum(m, gl.max(s, 1))
    shrink = gl.exp2(m - top)
    if PER_TOKEN and V_TYPE == INT4:
        weights = gl.exp2(s - gl.expand_dims(top - LIFTED_BITS, 1))
    else:
        weights = gl.exp2(s - gl.expand_dims(top, 1))
    if PER_TOKEN or V_TYPE != INT4:
        l = l * shrink + gl.sum(weights, 1)  # noqa: E741
    return top, l, shrink, weights


@gluon.jit
def with_values(acc, total, words, weights, shrink, V_TYPE: gl.constexpr):
    """(acc, total) of `attend` after words of V with these weights."""
    MMA: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = acc.shape[0]
    pt = transposed(weights.to(gl.float16), WARPS)
    pt = gl.convert_layout(pt, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    if V_TYPE == INT4:
        ones = gl.full([WARPS, 16, 64], 1.0, gl.float16, layout=gl.DotOperandLayout(0, MMA, 2))
        total = mma_v2(ones, pt, total * shrink)
    acc = mma_v2(values(words, V_TYPE, MMA), pt, acc * shrink)  # [WARPS, 128, 8]
    return acc, total


@cache
def _layouts(warps: int, k_words: int, v_rows: int):
    """How int32 words of K [warps, 64 rows, words] and V [warps, rows, 16] are held: 16 bytes each.

    A thread's words of a row of 32 are two runs of 4, of one of 16 they are one.
    """
    by_warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    wide = [[0, 0, 1], [0, 0, 2]]
    k = [*wide, *([[0, 0, 16]] if k_words == 32 else []), [0, 8, 0], [0, 16, 0], [0, 32, 0]]
    v = [*wide, [0, 8, 0], [0, 16, 0], [0, 32, 0], *([[0, 64, 0]] if v_rows == 128 else [])]
    return (
        gl.DistributedLinearLayout(k, lanes, by_warp, [], [warps, 64, k_words]),
        gl.DistributedLinearLayout(v, lanes, by_warp, [], [warps, v_rows, 16]),
    )


def launch(
    q: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    out_scale: Tensor | None,
    workspace: Workspace,
    split: KVSplit,
    metadata_ready: bool,
) -> None:
    """Run the kernel on what `kernels.triton.attention.decode.decode_attention` has checked."""
    pool, heads, per_token = inputs.pool, inputs.pool.k.shape[1], scale_kind(inputs.pool) == 3
    k, v, k_scale, v_scale = pool.k, pool.v, pool.k_scale, pool.v_scale
    assert k_scale is not None
    assert v_scale is not None
    packed = v.dtype == torch.uint8
    if packed and per_token:
        k_scale, v_scale = k_scale.view(torch.int32), v_scale.view(torch.int32)
    k_layout, v_layout = _layouts(split.warps, k.shape[3] // 4, v.shape[2])
    width, least = inputs.block_tables.shape[1], max(split.least, split.warps)  # a page a warp
    decode_kernel[(split.programs(width), heads, q.shape[0])](
        q, k.view(torch.int32), v.view(torch.int32), inputs.block_tables, inputs.context_len,
        k_scale, v_scale, out, out_scale, workspace.parts, workspace.arrivals,
        inputs.softmax_scale, width, pool.sink_k, pool.sink_v, HEADS=heads,
        GROUP=q.shape[1] // heads, SPLITS=split.splits, LEAST=least, PER_TOKEN=per_token,
        K_TYPE=TYPES[k.dtype], V_TYPE=TYPES[v.dtype], SINKS=pool.sink_tokens, WARPS=split.warps,
        K_LAYOUT=k_layout, V_LAYOUT=v_layout, num_warps=split.warps,
        METADATA_READY=metadata_ready, enable_fp_fusion=True, **overlap(early=False),
    )  # fmt: skip
