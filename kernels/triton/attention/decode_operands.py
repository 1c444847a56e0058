"""What decode attention multiplies, in registers as tensor cores take it (Gluon).

Part of `kernels.triton.attention.decode_hopper`, which says why it is so.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.attention.gluon_operands import (
    FP8,
    HIGH_UNIT,
    INT4,
    LOW_UNIT,
    channel_of,
    halves_of,
    to_fp16,
)

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
