"""Operands and results of attention's Gluon kernels: 8-bit pages as fp16 in registers, and order.

The order of a summed dimension is free as long as both operands share it. `channel_of` and
`token_of` say which channel and which token stand where, when a thread holds 16 bytes of a page as
they lie in memory.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def token_of(row):
    """The token of a page that a row of S^T stands for: 16 a + 8 b + 2 c + h -> 16 c + 4 a + ..."""
    return ((row >> 1) & 3) * 16 + (row >> 4) * 4 + ((row >> 3) & 1) * 2 + (row & 1)


@gluon.jit
def channel_of(k):
    """The channel of K that position k of the summed dimension stands for."""
    return k // 64 * 64 + k // 2 % 4 * 16 + k // 16 % 4 * 4 + k // 8 % 2 * 2 + k % 2


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
