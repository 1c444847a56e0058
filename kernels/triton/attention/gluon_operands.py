"""Operands and results of attention's Gluon kernels: quantized pages as fp16 in registers, and
order.

The order of a summed dimension is free as long as both operands share it. `channel_of` and
`token_of` say which channel and which token stand where, when a thread holds 16 bytes of a page as
they lie in memory.

An int4 number n, stored as n + 8, is masked out of its word and is an fp16 as it stands: one below
the normal ones, (n + 8) 2^-24 where it has the low four bits of a byte, (n + 8) 2^-20 where it has
the high ones, and tensor cores multiply those exactly. So five instructions make eight operands,
without a conversion; units and the eights are made good once, in sums (`LOW_UNIT`, `HIGH_UNIT`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
