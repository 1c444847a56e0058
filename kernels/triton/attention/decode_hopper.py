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

from kernels.triton.common import Workspace, overlap
from kernels.triton.gluon_names import barrier
from kernels.triton.tuning import Cut

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
LIFT = gl.constexpr(256.0)
ROUND = gl.constexpr(1.5 * 2.0**23)  # as in kernels.triton.common
INT8_TO_FP16 = gl.constexpr("""{ .reg .b32 u, c, lo, hi;
xor.b32 u, $4, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 lo, u, 0x64646464, 0x4140;
prmt.b32 hi, u, 0x64646464, 0x4342;
sub.rn.f16x2 lo, lo, c;
sub.rn.f16x2 hi, hi, c;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi; }""")  # 1024 + (b + 128), less 1152
FP8_TO_FP16 = gl.constexpr("""{ .reg .b16 a, b; .reg .b32 lo, hi;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 lo, a;
cvt.rn.f16x2.e4m3x2 hi, b;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi; }""")
PREFETCH = gl.constexpr("""{ .reg .pred first; .reg .b32 t;
mov.u32 t, %laneid;
setp.eq.u32 first, t, 0;
@first cp.async.bulk.prefetch.L2.global [$1], 8192;
mov.b32 $0, 0; }""")
TRANSPOSE = gl.constexpr("""{ .reg .b32 t;
mov.b32 t, {$2, $3};
movmatrix.sync.aligned.m8n8.trans.b16 t, t;
mov.b32 {$0, $1}, t; }""")


@gluon.jit
def to_fp16(words, FP8: gl.constexpr):
    """int32 words of four bytes [...] -> exact fp16 [..., pair, half]."""
    a, b, c, d = gl.inline_asm_elementwise(
        FP8_TO_FP16 if FP8 else INT8_TO_FP16,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(a, c), gl.join(b, d))


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
def token_of(row):
    """The token of a page that a row of S^T stands for: 16 a + 8 b + 2 c + h -> 16 c + 4 a + ..."""
    return ((row >> 1) & 3) * 16 + (row >> 4) * 4 + ((row >> 3) & 1) * 2 + (row & 1)


@gluon.jit
def channel_of(k):
    """The channel of K that position k of the summed dimension stands for."""
    return k // 64 * 64 + k // 2 % 4 * 16 + k // 16 % 4 * 4 + k // 8 % 2 * 2 + k % 2


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
    OVERLAP: gl.constexpr, SETTLED: gl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); the cache is given as int32 words.

    A split takes a page a warp or more, so that the splits of a short sequence are few.
    """
    split, head, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    if not SETTLED:
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
    if SETTLED:
        if OVERLAP:  # L2 is where the page of the new token is written, too
            prefetch(k_pages + page.to(gl.int64) * 2048)
            prefetch(v_pages + page.to(gl.int64) * 2048)
        wait(OVERLAP)
    raw_k = gl.load(k_pages + page.to(gl.int64) * 2048 + k_words)
    member = span(8, RIGHT, 2) + span(WARPS, RIGHT, 0) * 0
    rows = (sequence * HEADS + head) * GROUP
    q_place = q + (rows + member) * 128 + channel_of(span(128, RIGHT, 1))
    qt = gl.load(q_place, mask=member < GROUP, other=0.0).to(gl.float16)  # [WARPS, 128, 8]
    factor = softmax_scale * LOG2_E
    if not PER_TOKEN:
        factor *= gl.load(k_scale + head)
    token = token_of(span(64, MMA, 1))
    own = span(WARPS, MMA, 0)
    SUM: gl.constexpr = gl.SliceLayout(1, MMA)
    m = gl.full([WARPS, 8], LOWEST, gl.float32, layout=SUM)
    l = gl.full([WARPS, 8], 0.0, gl.float32, layout=SUM)  # noqa: E741
    acc = gl.full([WARPS, 128, 8], 0.0, gl.float32, layout=MMA)
    zero = gl.full([WARPS, 64, 8], 0.0, gl.float32, layout=MMA)
    for p in range(first, end, WARPS):
        v_page = gl.convert_layout(page, V_LAYOUT)
        raw_v = gl.load(v_pages + v_page.to(gl.int64) * 2048 + v_words)
        scales = gl.convert_layout(page, MMA) * 64 + token
        following = gl.minimum(p + WARPS + warp, width - 1)
        page = gl.load(table + following).to(gl.int32) * HEADS + head
        k = to_fp16(raw_k, FP8).reshape([WARPS, 64, 2, 4, 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
        k = gl.convert_layout(k.reshape([WARPS, 64, 128]), LEFT, assert_trivial=True)
        s = mma_v2(k, qt, zero)  # [WARPS, 64, 8]
        raw_k = gl.load(k_pages + page.to(gl.int64) * 2048 + k_words)
        if PER_TOKEN:
            s = s * gl.load(k_scale + scales).to(gl.float32)
        seen = (p + own) * 64 + token < gl.minimum(length, end * 64)
        s = gl.where(seen, s * factor, LOWEST)
        top = gl.maximum(m, gl.max(s, 1))
        shrink = gl.exp2(m - top)
        weights = gl.exp2(s - gl.expand_dims(top, 1))
        l = l * shrink + gl.sum(weights, 1)  # noqa: E741
        m = top
        if PER_TOKEN:
            weights = weights * (gl.load(v_scale + scales).to(gl.float32) * LIFT)
            weights = gl.where(seen, weights, 0.0)
        pt = transposed(weights.to(gl.float16), WARPS)
        pt = gl.convert_layout(pt, RIGHT, assert_trivial=True)
        v = to_fp16(raw_v, FP8).reshape([WARPS, 128, 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5])
        v = gl.convert_layout(v.reshape([WARPS, 128, 64]), LEFT, assert_trivial=True)
        acc = mma_v2(v, pt, acc * gl.expand_dims(shrink, 1))  # [WARPS, 128, 8]
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    m_all = gl.max(m, 0)
    e = gl.exp2(m - gl.expand_dims(m_all, 0))
    l_all = gl.convert_layout(gl.sum(l * e, 0), gl.SliceLayout(0, ROW))
    m_all = gl.convert_layout(m_all, gl.SliceLayout(0, ROW))
    o = gl.sum(acc * gl.expand_dims(e, 1), 0)  # [128, 8]
    d = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, ROW)), 1)
    h = gl.arange(0, 8, layout=gl.SliceLayout(0, ROW))
    real = (gl.expand_dims(h, 0) + d * 0) < GROUP
    unit = 1.0 / LIFT
    if not PER_TOKEN:
        unit = gl.load(v_scale + head)
    if runs == 1:
        y = o * gl.expand_dims(gl.where(l_all > 0, unit / l_all, 0.0), 0)
        cells = out + (rows + gl.expand_dims(h, 0)) * 128 + d
        gl.store(cells, finish(y, out, out_scale), mask=real)
    else:
        item = sequence * HEADS + head
        place = parts + (item * SPLITS + split).to(gl.int64) * (GROUP * 130)
        gl.store(place + gl.expand_dims(h, 0) * 128 + d, o, mask=real)
        gl.store(place + GROUP * 128 + h, m_all, mask=h < GROUP)
        gl.store(place + GROUP * 129 + h, l_all, mask=h < GROUP)
        barrier()
        if gl.atomic_add(arrivals + item, 1, sem="acq_rel") == runs - 1:
            barrier()
            place = parts + (item * SPLITS).to(gl.int64) * (GROUP * 130)
            combine(place, out + rows * 128, out_scale, unit, runs, GROUP, SPLITS, WARPS)
            gl.store(arrivals + item, 0)


@gluon.jit
def transposed(weights, WARPS: gl.constexpr):
    """fp16 S^T-shaped [WARPS, 64, 8] -> the same numbers where the right operand wants them."""
    low, high = gl.split(weights.reshape([WARPS, 64, 4, 2]))
    low, high = gl.inline_asm_elementwise(
        TRANSPOSE,
        "=h,=h,h,h",
        [low, high],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    blocks = gl.join(low, high).reshape([WARPS, 8, 8, 8]).permute([0, 1, 3, 2])
    return blocks.reshape([WARPS, 64, 8])


@gluon.jit
def finish(y, out, out_scale):
    """y in the type of `out`, quantized with one scale if that has eight bits."""
    TYPE: gl.constexpr = out.dtype.element_ty
    TOP: gl.constexpr = 127.0 if out.dtype.element_ty == gl.int8 else 448.0
    if TYPE.primitive_bitwidth == 8:
        y = gl.div_rn(y, y * 0.0 + gl.load(out_scale))
        y = gl.minimum(gl.maximum(y, -TOP), TOP)
        if out.dtype.element_ty == gl.int8:
            y = (y + ROUND) - ROUND
    return y.to(TYPE)


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
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lengths: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, out_scale: Tensor | None, workspace: Workspace,
    softmax_scale: float, cut: Cut, settled: bool,
) -> None:  # fmt: skip
    """Run the kernel on what `kernels.triton.attention.decode.decode_attention` has checked."""
    sequences, heads = q.shape[0], k_pages.shape[1]
    k_layout, v_layout = _layouts(cut.warps)
    decode_kernel[(cut.splits, heads, sequences)](
        q, k_pages.view(torch.int32), v_pages.view(torch.int32), tables, lengths, k_scale, v_scale,
        out, out_scale, workspace.parts, workspace.arrivals, softmax_scale, tables.shape[1],
        HEADS=heads, GROUP=q.shape[1] // heads, SPLITS=cut.splits, PER_TOKEN=k_scale.dim() == 3,
        FP8=k_pages.dtype == torch.float8_e4m3fn, WARPS=cut.warps, K_LAYOUT=k_layout,
        V_LAYOUT=v_layout, num_warps=cut.warps, SETTLED=settled, enable_fp_fusion=True,
        **overlap(early=False),
    )  # fmt: skip
