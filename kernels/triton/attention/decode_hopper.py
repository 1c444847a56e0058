"""Decode attention of `kernels.triton.attention.decode` with register layouts stated: 8 bits, D =
128.

Every warp owns whole pages with a running maximum, sum and result of its own: no shared memory and
no barrier in the loop; warps are merged once, at the end. What makes that possible:

- K and V go from memory to the tensor cores' operand registers by loads of 16 bytes a thread. The
  order of the summed dimension is free as long as both operands share it: q is loaded in the order
  in which a thread's 16 bytes of K hold channels, and the rows of S^T stand for tokens in the order
  in which a thread's 16 bytes of V hold them (`token_of`).
- S^T = K q^T and O^T = V^T P^T, so that the dimension that is padded to 8 is the queries of a KV
  head. P^T turns from a sum into an operand by transposing 8 x 8 blocks inside the warp.
- The next page of K is on its way to registers before this page's V is used.

The kernel of `kernels.triton.attention.decode`, whose launcher chooses, is the plain twin, and
takes what this one does not. The results of the two differ by the rounding of fp32 sums.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.attention_inputs import AttentionInputs
from kernels.triton.attention.gluon_operands import (
    channel_of,
    finish,
    to_fp16,
    token_of,
    transposed,
)
from kernels.triton.attention.paged_cache import scale_kind
from kernels.triton.common import Workspace, overlap
from kernels.triton.gluon_names import barrier
from kernels.triton.tuning import KVSplit

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
LIFT = gl.constexpr(256.0)
PREFETCH = gl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %laneid;
setp.eq.u32 first, t, 0;
@first cp.async.bulk.prefetch.L2.global [$1], 8192;
mov.b32 $0, 0; }""")


@gluon.jit
def wait(OVERLAP: gl.constexpr):
    """As in kernels.triton.common."""
    if OVERLAP:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def prefetch(places):
    """Ask for the 8 KiB at each warp's pointer to be brought into L2."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [places], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def span(SIZE: gl.constexpr, LAYOUT: gl.constexpr, DIM: gl.constexpr):
    """0 .. SIZE - 1 along dimension DIM of three."""
    if DIM == 0:
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, layout=rows), 1), 2)
    elif DIM == 1:  # noqa: RET505  (a return does not end what is compiled)
        columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, layout=columns), 0), 2)
    else:
        depth: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
        return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, layout=depth), 0), 1)


@gluon.jit(do_not_specialize=["width"])
def decode_kernel(
    q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, out_scale, parts, arrivals,
    softmax_scale, width,
    HEADS: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, PER_TOKEN: gl.constexpr,
    FP8: gl.constexpr, WARPS: gl.constexpr, K_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr,
    OVERLAP: gl.constexpr, METADATA_READY: gl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); the cache is given as int32 words.

    A split takes a page a warp or more, so that the splits of a short sequence are few.
    """
    split, head, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    if not METADATA_READY:
        wait(OVERLAP)
    length = gl.load(lengths + sequence).to(gl.int32)
    pages = (length + 63) // 64
    share = gl.maximum((pages + SPLITS - 1) // SPLITS, WARPS)
    runs = gl.maximum((pages + share - 1) // share, 1)
    if split >= runs:
        return
    first = split * share
    end = gl.minimum(first + share, pages)
    table = tables + sequence * width
    warp = span(WARPS, K_LAYOUT, 0)
    page = gl.load(table + gl.minimum(first + warp, width - 1)).to(gl.int32) * HEADS + head
    k_words = token_of(span(64, K_LAYOUT, 1)) * 32 + span(32, K_LAYOUT, 2)
    v_words = span(128, V_LAYOUT, 1) * 16 + span(16, V_LAYOUT, 2)
    if METADATA_READY:
        if OVERLAP:  # L2 is where the page of the new token is written, too
            prefetch(k_pages + page.to(gl.int64) * 2048)
            prefetch(v_pages + page.to(gl.int64) * 2048)
        wait(OVERLAP)
    raw_k = gl.load(k_pages + page.to(gl.int64) * 2048 + k_words)
    rows = (sequence * HEADS + head) * GROUP
    qt = queries(q, rows, GROUP, WARPS, MMA)
    factor = softmax_scale * LOG2_E
    if not PER_TOKEN:
        factor *= gl.load(k_scale + head)
    m = gl.full([WARPS, 8], LOWEST, gl.float32, layout=gl.SliceLayout(1, MMA))
    l = gl.full([WARPS, 8], 0.0, gl.float32, layout=gl.SliceLayout(1, MMA))  # noqa: E741
    acc = gl.full([WARPS, 128, 8], 0.0, gl.float32, layout=MMA)
    for p in range(first, end, WARPS):
        m, l, acc, page, raw_k = attend(  # noqa: E741
            m, l, acc, page, raw_k, qt, factor, p, end, length, table, width, head, k_words,
            v_words, k_pages, v_pages, k_scale, v_scale, HEADS, PER_TOKEN, FP8,
        )  # fmt: skip
    o, m_all, l_all = merge_warps(m, l, acc)
    unit = 1.0 / LIFT
    if not PER_TOKEN:
        unit = gl.load(v_scale + head)
    leave(
        o, m_all, l_all, out, rows, out_scale, unit, parts, arrivals, sequence * HEADS + head,
        split, runs, GROUP, SPLITS, WARPS,
    )  # fmt: skip


@gluon.jit
def queries(q, row, GROUP: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """The queries of a KV head as the right operand of every warp: fp16 [WARPS, 128, 8]."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    member = span(8, RIGHT, 2) + span(WARPS, RIGHT, 0) * 0
    place = q + (row + member) * 128 + channel_of(span(128, RIGHT, 1))
    return gl.load(place, mask=member < GROUP, other=0.0).to(gl.float16)


@gluon.jit
def attend(
    m, l, acc, page, raw_k, qt, factor, p, end, length, table, width, head,  # noqa: E741
    k_words, v_words, k_pages, v_pages, k_scale, v_scale,
    HEADS: gl.constexpr, PER_TOKEN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Each warp attends to its page; its next page, and K of that, are on their way meanwhile.

    Args:
        m, l, acc: Running maximum, sum [WARPS, 8] and result [WARPS, 128, 8] so far.
        page: Each warp's page times heads, whose K is in `raw_k`.
        raw_k: Its words of K.
        qt: Queries, fp16 [WARPS, 128, 8].
        factor: Of scores.
        p: The first warp's page within the sequence.
        end: The page that the run ends before.
        length: Tokens of the sequence.
        table: The sequence's block table, `width` entries.
        head: The KV head.
        k_words, v_words: Where a page's words of K and of V lie in it.

    Returns:
        (m, l, acc, page, raw_k) for the next page.
    """
    MMA: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = acc.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    K_LAYOUT: gl.constexpr = k_words.type.layout
    token = token_of(span(64, MMA, 1))
    v_page = gl.convert_layout(page, v_words.type.layout)
    raw_v = gl.load(v_pages + v_page.to(gl.int64) * 2048 + v_words)
    scales = gl.convert_layout(page, MMA) * 64 + token
    following = gl.minimum(p + WARPS + span(WARPS, K_LAYOUT, 0), width - 1)
    page = gl.load(table + following).to(gl.int32) * HEADS + head
    k = to_fp16(raw_k, FP8).reshape([WARPS, 64, 2, 4, 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    k = gl.convert_layout(k.reshape([WARPS, 64, 128]), LEFT, assert_trivial=True)
    s = mma_v2(k, qt, gl.full([WARPS, 64, 8], 0.0, gl.float32, layout=MMA))
    raw_k = gl.load(k_pages + page.to(gl.int64) * 2048 + k_words)
    if PER_TOKEN:
        s = s * gl.load(k_scale + scales).to(gl.float32)
    seen = (p + span(WARPS, MMA, 0)) * 64 + token < gl.minimum(length, end * 64)
    s = gl.where(seen, s * factor, LOWEST)
    top = gl.maximum(m, gl.max(s, 1))
    shrink = gl.exp2(m - top)
    weights = gl.exp2(s - gl.expand_dims(top, 1))
    l = l * shrink + gl.sum(weights, 1)  # noqa: E741
    if PER_TOKEN:
        weights = weights * (gl.load(v_scale + scales).to(gl.float32) * LIFT)
        weights = gl.where(seen, weights, 0.0)
    pt = transposed(weights.to(gl.float16), WARPS)
    pt = gl.convert_layout(pt, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    v = to_fp16(raw_v, FP8).reshape([WARPS, 128, 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    v = gl.convert_layout(v.reshape([WARPS, 128, 64]), LEFT, assert_trivial=True)
    acc = mma_v2(v, pt, acc * gl.expand_dims(shrink, 1))  # [WARPS, 128, 8]
    return top, l, acc, page, raw_k


@gluon.jit
def merge_warps(m, l, acc):  # noqa: E741
    """(result [128, 8], maximum [8], sum [8]) of a program from those of its warps."""
    ROW: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    m_all = gl.max(m, 0)
    e = gl.exp2(m - gl.expand_dims(m_all, 0))
    l_all = gl.convert_layout(gl.sum(l * e, 0), gl.SliceLayout(0, ROW))
    m_all = gl.convert_layout(m_all, gl.SliceLayout(0, ROW))
    return gl.sum(acc * gl.expand_dims(e, 1), 0), m_all, l_all


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


@cache
def _layouts(warps: int):
    """How int32 words of K [warps, 64 rows, 32] and V [warps, 128, 16] are held: 16 bytes each."""
    by_warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    wide = [[0, 0, 1], [0, 0, 2]]
    k = [*wide, [0, 0, 16], [0, 8, 0], [0, 16, 0], [0, 32, 0]]
    v = [*wide, [0, 8, 0], [0, 16, 0], [0, 32, 0], [0, 64, 0]]
    return (
        gl.DistributedLinearLayout(k, lanes, by_warp, [], [warps, 64, 32]),
        gl.DistributedLinearLayout(v, lanes, by_warp, [], [warps, 128, 16]),
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
    pool, heads = inputs.pool, inputs.pool.k.shape[1]
    k_layout, v_layout = _layouts(split.warps)
    decode_kernel[(split.splits, heads, q.shape[0])](
        q, pool.k.view(torch.int32), pool.v.view(torch.int32), inputs.block_tables,
        inputs.context_len, pool.k_scale, pool.v_scale, out, out_scale, workspace.parts,
        workspace.arrivals, inputs.softmax_scale, inputs.block_tables.shape[1],
        HEADS=heads, GROUP=q.shape[1] // heads, SPLITS=split.splits,
        PER_TOKEN=scale_kind(pool) == 3, FP8=pool.k.dtype == torch.float8_e4m3fn,
        WARPS=split.warps, K_LAYOUT=k_layout, V_LAYOUT=v_layout, num_warps=split.warps,
        METADATA_READY=metadata_ready, enable_fp_fusion=True, **overlap(early=False),
    )  # fmt: skip
