"""What attention's Gluon kernels are made of: operands in registers, and sums of parts of a row.

Quantized pages become fp16 in registers, in an order of their own.

The order of a summed dimension is free as long as both operands share it. `channel_of` and
`token_of` say which channel and which token stand where, when a thread holds 16 bytes of a page as
they lie in memory.

An int4 number n, stored as n + 8, is masked out of its word and is an fp16 as it stands: one below
the normal ones, (n + 8) 2^-24 where it has the low four bits of a byte, (n + 8) 2^-20 where it has
the high ones, and tensor cores multiply those exactly. So five instructions make eight operands,
without a conversion; units and the eights are made good once, in sums (`LOW_UNIT`, `HIGH_UNIT`).

The operands of decode are as tensor cores take them. Its warps, and programs that share a sequence,
leave parts of the result, which are added up; `kernels.triton.attention.decode_hopper` says why.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.gluon_names import barrier

LOWEST = gl.constexpr(-1e30)  # a maximum of nothing
LIFT = gl.constexpr(256.0)  # of weights that a token's scale makes small
INT4 = gl.constexpr(4)  # what pages hold: int4 is two in a byte
INT8 = gl.constexpr(8)
FP8 = gl.constexpr(9)
TYPES = {torch.uint8: INT4.value, torch.int8: INT8.value, torch.float8_e4m3fn: FP8.value}
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
INT4_TO_FP16 = gl.constexpr("""{ .reg .b32 u, a, b, c, d;
shr.u32 u, $8, 8;
and.b32 a, $8, 0x000f000f;
and.b32 b, $8, 0x00f000f0;
and.b32 c, u, 0x000f000f;
and.b32 d, u, 0x00f000f0;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d; }""")  # low fours of bytes 0 and 2, high ones, low ones of 1 and 3, high ones
INT4_LESS_8 = gl.constexpr("""{ .reg .b32 u, a, b, c, d, less, part, rest;
mov.b32 less, 0x64086408;
mov.b32 part, 0x2c002c00;
mov.b32 rest, 0xd480d480;
shr.u32 u, $8, 8;
lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $8, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 c, u, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, u, 0x00f000f0, 0x64006400, 0xea;
sub.rn.f16x2 a, a, less;
fma.rn.f16x2 b, b, part, rest;
sub.rn.f16x2 c, c, less;
fma.rn.f16x2 d, d, part, rest;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d; }""")  # 1024 + n + 8, less 1032; 1024 + 16 (n + 8), by 16, less 72
LOW_UNIT = gl.constexpr(2.0**-24)  # what a one in the low four bits of a byte is as fp16
HIGH_UNIT = gl.constexpr(2.0**-20)
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
def halves_of(words, SIGNED: gl.constexpr = False):
    """int32 words of eight int4 [...] -> fp16 [..., high, odd, pair]: of the byte 2 pair + odd.

    They are n + 8 in `LOW_UNIT` and `HIGH_UNIT`, or with SIGNED, for twice the instructions, n.
    """
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        INT4_LESS_8 if SIGNED else INT4_TO_FP16,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(
            gl.float16, gl.float16, gl.float16, gl.float16,
            gl.float16, gl.float16, gl.float16, gl.float16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    first = gl.join(gl.join(a, c), gl.join(e, g))
    return gl.join(first, gl.join(gl.join(b, d), gl.join(f, h)))


@gluon.jit
def byte_of(pair, half, PACKED: gl.constexpr):
    """Which byte of a word is half of a pair of operands; int4 pairs are bytes 0 and 2, 1 and 3."""
    return half * 2 + pair if PACKED else pair * 2 + half


@gluon.jit
def token_of(row, PACKED: gl.constexpr):
    """The token of a page that a row of S^T stands for: 16 a + 8 b + 2 c + h -> 16 c + 4 a + ..."""
    return ((row >> 1) & 3) * 16 + (row >> 4) * 4 + byte_of((row >> 3) & 1, row & 1, PACKED)


@gluon.jit
def channel_of(k, PACKED: gl.constexpr):
    """The channel of K that position k of the summed dimension stands for."""
    run = k // 64 * 64 + k // 16 % 4 * 4
    if PACKED:  # both halves of a word after one another
        run = k // 16 % 2 * 64 + k // 32 * 4
    return run + k // 2 % 4 * 16 + byte_of(k // 8 % 2, k % 2, PACKED)


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


SCALES = gl.constexpr("mov.b32 {$0, $1}, $2;")


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


@gluon.jit
def queries(
    q, row, GROUP: gl.constexpr, WARPS: gl.constexpr, K_TYPE: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """The queries of a KV head as the right operand of every warp: fp16 [WARPS, 128, 8].

    Beside an int4 K they have the units of its two halves in them: all products are in 4 LOW_UNIT.
    """
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    member = span(8, RIGHT, 2) + span(WARPS, RIGHT, 0) * 0
    channel = channel_of(span(128, RIGHT, 1), K_TYPE == INT4)
    x = gl.load(q + (row + member) * 128 + channel, mask=member < GROUP, other=0.0)
    if K_TYPE == INT4:
        x = x.to(gl.float32) * gl.where(channel < 64, 4.0, 0.25)
    return x.to(gl.float16)


@gluon.jit
def eights(WARPS: gl.constexpr, MMA: gl.constexpr):
    """Rows of an int4 K whose every number is stored as 8, fp16 [WARPS, 16, 128]."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    k = span(128, LEFT, 2) + span(16, LEFT, 1) * 0 + span(WARPS, LEFT, 0) * 0
    low = channel_of(k, True) < 64
    return gl.where(low, 8.0 * LOW_UNIT, 8.0 * HIGH_UNIT).to(gl.float16)


@gluon.jit
def keys(raw, TYPE: gl.constexpr, MMA: gl.constexpr):
    """Words of pages of K as the left operand, fp16 [WARPS, 64, 128], rows as `token_of` says."""
    WARPS: gl.constexpr = raw.shape[0]
    if TYPE == INT4:  # [warp, row, thread, word, high, odd, pair]
        k = halves_of(raw).reshape([WARPS, 64, 4, 4, 2, 2, 2]).permute([0, 1, 3, 4, 5, 2, 6])
    else:
        k = to_fp16(raw, TYPE == FP8).reshape([WARPS, 64, 2, 4, 4, 2, 2])
        k = k.permute([0, 1, 2, 4, 5, 3, 6])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    return gl.convert_layout(k.reshape([WARPS, 64, 128]), LEFT, assert_trivial=True)


@gluon.jit
def values(raw, TYPE: gl.constexpr, MMA: gl.constexpr):
    """Words of pages of V as the left operand, fp16 [WARPS, 128, 64], tokens by `token_of`."""
    WARPS: gl.constexpr = raw.shape[0]
    if TYPE == INT4:
        v = halves_of(raw).reshape([WARPS, 64, 4, 4, 2, 2, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    else:
        v = to_fp16(raw, TYPE == FP8).reshape([WARPS, 128, 4, 4, 2, 2])
        v = v.permute([0, 1, 3, 4, 2, 5])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    return gl.convert_layout(v.reshape([WARPS, 128, 64]), LEFT, assert_trivial=True)


@gluon.jit
def scale_words(scales, page, MMA: gl.constexpr):
    """Scales of each warp's page, two neighbouring tokens a word, int32 [WARPS, 32, 1].

    Word 8 a + 2 c + h is of the tokens of rows 16 a + 2 c + h and 8 more, see `token_of`.
    """
    PAIRS: gl.constexpr = pair_layout(MMA)
    row = span(32, PAIRS, 1)
    place = ((row >> 1) & 3) * 8 + (row >> 3) * 2 + (row & 1)
    return gl.load(scales + gl.convert_layout(page, PAIRS).to(gl.int64) * 32 + place)


@gluon.jit
def two_scales(words, MMA: gl.constexpr):
    """Words of two fp16 -> fp32 [WARPS, 64, 1], rows as those of scores."""
    WARPS: gl.constexpr = words.shape[0]
    low, high = gl.inline_asm_elementwise(
        SCALES, "=h,=h,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    both = gl.join(low, high).reshape([WARPS, 4, 8, 1, 2]).permute([0, 1, 4, 2, 3])
    return gl.convert_layout(both.reshape([WARPS, 64, 1]), MMA).to(gl.float32)


@gluon.constexpr_function
def pair_layout(mma):
    """How a warp of an MMA layout holds one of 32 words for two rows: the lanes of its rows."""
    warps = mma.warps_per_cta[0]
    by_warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([[0, 8, 0], [0, 16, 0]], lanes, by_warp, [], [warps, 32, 1])


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
