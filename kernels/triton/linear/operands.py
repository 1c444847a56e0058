"""4- and 8-bit weights, packed so that they become tensor-core operands in registers.

A tile is 64 outputs by 128 inputs in the order in which the 128 threads of a warpgroup hold it as
left operand of two-byte floats: 16 bytes a thread and load, nothing is shuffled. A word of 32 bits
holds weights of one output. Of 4 bits, word t: inputs k = 32 j + 2 t + h at bits 4 j + 16 h, as
q + 8. Of 8 bits, word t of half i: inputs k = 64 i + 32 j + 2 t + h at bits 8 j + 16 h, as q + 128.

A byte permutation, or a mask and an `or`, turns a word's parts into pairs of floats 1024 + n (fp16)
or 128 + n (bf16), from which 1024 + 8 + z or its like is taken: a zero point costs nothing. bf16
holds 128 + n for n < 128 alone: the eighth bit of a byte chooses between -128 and -256.

int8 operands are made of the same words of 4 bits, as `kernels.triton.linear.w4a8` multiplies them:
16 q, q - z, or q m.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportMissingImports=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import ASM
from kernels.triton.linear.packing import BLOCK

_FP16_4 = """{{ .reg .b32 a, t, bias, part, high;
mov.b32 bias, 0x64086408;
mov.b32 part, 0x2C002C00;
mov.b32 high, 0xD480D480;
shr.u32 t, $8, 8;
lop3.b32 a, $8, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 a, a, {0}; mov.b32 {{$0, $1}}, a;
lop3.b32 a, $8, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 a, a, part, {1}; mov.b32 {{$2, $3}}, a;
lop3.b32 a, t, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 a, a, {2}; mov.b32 {{$4, $5}}, a;
lop3.b32 a, t, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 a, a, part, {3}; mov.b32 {{$6, $7}}, a;
}}"""  # the second and fourth are 1024 + 16 n: a sixteenth of it less 64 + 8 + z
_STEP = "lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 a, a, one, {%d};"
_BF16_4 = (
    "{{ .reg .b32 a, t, one, bias;\nmov.b32 one, 0x3F803F80;\nmov.b32 bias, 0xC308C308;\n"
    + "".join(
        f"shr.u32 t, $8, {4 * j}; {_STEP % j} mov.b32 {{{{${2 * j}, ${2 * j + 1}}}}}, a;\n"
        for j in range(4)
    )
    + "}}"
)  # bf16 has no room for 16 n in its fraction; its only packed sum before sm_90 is the fma
_FP16_8 = """{{ .reg .b32 a, bias;
mov.b32 bias, 0x64806480;
prmt.b32 a, $4, 0x64646464, 0x4240; sub.rn.f16x2 a, a, {0}; mov.b32 {{$0, $1}}, a;
prmt.b32 a, $4, 0x64646464, 0x4341; sub.rn.f16x2 a, a, {1}; mov.b32 {{$2, $3}}, a;
}}"""
_LOW, _HIGH = (
    f"lop3.b32 a, {word}, 0x007F007F, 0x43004300, 0xEA; "
    f"lop3.b32 b, {word}, 0x00800080, 0xC380C380, 0x6A; fma.rn.bf16x2 a, a, one, b; "
    for word in ("$4", "t")
)
_BF16_8 = f"""{{{{ .reg .b32 a, b, t, one;
mov.b32 one, 0x3F803F80;
shr.u32 t, $4, 8;
{_LOW}{{0}}mov.b32 {{{{$0, $1}}}}, a;
{_HIGH}{{1}}mov.b32 {{{{$2, $3}}}}, a;
}}}}"""
_LESS = "fma.rn.bf16x2 a, a, one, {}; "

FP16_4 = tl.constexpr(_FP16_4.format("bias", "high", "bias", "high"))
BF16_4 = tl.constexpr(_BF16_4.format(*["bias"] * 4))
FP16_8 = tl.constexpr(_FP16_8.format("bias", "bias"))
BF16_8 = tl.constexpr(_BF16_8.format("", ""))
FP16_4_ZERO = tl.constexpr(_FP16_4.format("$9", "$10", "$11", "$12"))
BF16_4_ZERO = tl.constexpr(_BF16_4.format("$9", "$10", "$11", "$12"))
FP16_8_ZERO = tl.constexpr(_FP16_8.format("$5", "$6"))
BF16_8_ZERO = tl.constexpr(_BF16_8.format(_LESS.format("$5"), _LESS.format("$6")))


def pack_tiles(q: Tensor, bits: int) -> Tensor:
    """Integers [N, K] of 4 or 8 bits -> int32 [K / 128, N / 64, 256 bits]."""
    *experts, outputs, inputs = q.shape
    tiles, blocks = outputs // 64, inputs // BLOCK
    sizes = (-1, tiles, 4, 2, 8, blocks, 2, 2, 4, 4, 2)  # of output 16 a + 8 b + c of a tile
    if bits == 8:  # [expert, tile, a, b, c, block, i, j, t / 4, t % 4, h]
        packed = (q ^ -128).reshape(sizes).permute(0, 5, 1, 6, 3, 2, 4, 9, 8, 10, 7)
    else:  # [expert, tile, a, b, c, block, j / 2, j % 2, t / 4, t % 4, h], in byte 2 h + j / 2
        low, high = (q + 8).view(torch.uint8).reshape(sizes).unbind(7)
        packed = (low | (high << 4)).permute(0, 5, 1, 3, 2, 4, 8, 7, 9, 6)
    return packed.reshape(*experts, blocks, tiles, 1024 * bits).view(torch.int32)


@triton.jit
def quarters(
    words, z0, z1, z2, z3, BITS: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr,
    WARP: tl.constexpr = False,
):  # fmt: skip
    """Packed tiles [tiles, 256 BITS] -> weights of inputs 32 j to 32 j + 31, four [outputs, 32].

    If WARP, inputs are in the order of `as_warps_read`.

    Args:
        words: int32.
        z0: int32 [outputs], zero points + 2^(BITS - 1) of the first quarter, if `ZERO`.
        z1: Of the second.
        z2: Of the third.
        z3: Of the fourth.
        BITS: Of a weight.
        ZERO: Whether there are zero points.
    """
    tiles: tl.constexpr = words.shape[0]
    if BITS == 4:
        words = words_of(words, WARP)
        q0, q1, q2, q3 = nibbles(words, z0, z1, z2, z3, ZERO, dtype)
    else:
        words = words.reshape(tiles, 2, 2, 4, 8, 4, 2, 2)
        if WARP:
            words = words.permute(0, 3, 2, 4, 6, 5, 7, 1)
        else:
            words = words.permute(0, 3, 2, 4, 6, 7, 5, 1)
        low, high = words.reshape(tiles * 64, 16, 2).split()
        q0, q1 = bytes_of(low, z0, z1, ZERO, dtype)
        q2, q3 = bytes_of(high, z2, z3, ZERO, dtype)
    return q0, q1, q2, q3


@triton.jit
def words_of(words, WARP: tl.constexpr):
    """Packed tiles of 4 bits [tiles, 1024] -> the words of each output, [outputs, 16]."""
    tiles: tl.constexpr = words.shape[0]
    words = words.reshape(tiles, 2, 4, 8, 4, 2, 2)
    words = words.permute(0, 2, 1, 3, 5, 4, 6) if WARP else words.permute(0, 2, 1, 3, 5, 6, 4)
    return words.reshape(tiles * 64, 16)


@triton.jit
def as_warps_read(x):
    """Inputs [K, rows] in the order in which Triton lays operands of `mma.sync` out: of each 32
    bytes the words of 32 bits 0, 4, 1, 5, 2, 6, 3, 7.

    A product does not depend on an order that both operands have, and stored tiles become
    operands in this one without a shuffle.
    """
    inputs: tl.constexpr = x.shape[0]
    rows: tl.constexpr = x.shape[1]
    word: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    x = x.reshape(inputs // (8 * word), 2, 4, word, rows).permute(0, 2, 1, 3, 4)
    return x.reshape(inputs, rows)


@triton.jit
def nibbles(words, z0, z1, z2, z3, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Words [outputs, 16] -> four [outputs, 32]: registers get new names."""
    half = (
        tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    )  # not a constexpr, which a tuple bars
    if ASM and ZERO:
        b0, b1 = bias_of(z0, 4, False, dtype), bias_of(z1, 4, True, dtype)
        b2, b3 = bias_of(z2, 4, False, dtype), bias_of(z3, 4, True, dtype)
        l0, h0, l1, h1, l2, h2, l3, h3 = tl.inline_asm_elementwise(
            BF16_4_ZERO if dtype == tl.bfloat16 else FP16_4_ZERO,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            [words, b0, b1, b2, b3],
            dtype=(half, half, half, half, half, half, half, half),
            is_pure=True,
            pack=1,
        )
    elif ASM:
        l0, h0, l1, h1, l2, h2, l3, h3 = tl.inline_asm_elementwise(
            BF16_4 if dtype == tl.bfloat16 else FP16_4,
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [words],
            dtype=(half, half, half, half, half, half, half, half),
            is_pure=True,
            pack=1,
        )
    else:
        l0, h0 = part(words, 0, z0, 4, ZERO, dtype), part(words, 16, z0, 4, ZERO, dtype)
        l1, h1 = part(words, 4, z1, 4, ZERO, dtype), part(words, 20, z1, 4, ZERO, dtype)
        l2, h2 = part(words, 8, z2, 4, ZERO, dtype), part(words, 24, z2, 4, ZERO, dtype)
        l3, h3 = part(words, 12, z3, 4, ZERO, dtype), part(words, 28, z3, 4, ZERO, dtype)
    return interleave(l0, h0), interleave(l1, h1), interleave(l2, h2), interleave(l3, h3)


@triton.jit
def bytes_of(words, z0, z1, ZERO: tl.constexpr, dtype: tl.constexpr):
    """Words [outputs, 16] -> two [outputs, 32]."""
    half = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    if ASM and ZERO:
        b0, b1 = bias_of(z0, 8, False, dtype), bias_of(z1, 8, False, dtype)
        l0, h0, l1, h1 = tl.inline_asm_elementwise(
            BF16_8_ZERO if dtype == tl.bfloat16 else FP16_8_ZERO,
            "=h,=h,=h,=h,r,r,r",
            [words, b0, b1],
            dtype=(half, half, half, half),
            is_pure=True,
            pack=1,
        )
    elif ASM:
        l0, h0, l1, h1 = tl.inline_asm_elementwise(
            BF16_8 if dtype == tl.bfloat16 else FP16_8,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(half, half, half, half),
            is_pure=True,
            pack=1,
        )
    else:
        l0, h0 = part(words, 0, z0, 8, ZERO, dtype), part(words, 16, z0, 8, ZERO, dtype)
        l1, h1 = part(words, 8, z1, 8, ZERO, dtype), part(words, 24, z1, 8, ZERO, dtype)
    return interleave(l0, h0), interleave(l1, h1)


@triton.jit
def bias_of(z, BITS: tl.constexpr, odd: tl.constexpr, dtype: tl.constexpr):
    """What the assembly takes a zero point as: [outputs, 1] words of two equal floats."""
    if dtype == tl.bfloat16 and BITS == 8:  # 128 - z, which bf16 has room for
        bits = (128 - z).to(tl.float32).to(tl.int32, bitcast=True)
        word = ((bits >> 16) & 0xFFFF) * 0x00010001
    elif dtype == tl.bfloat16:  # -(128 + z)
        word = z * 0x00010001 - 0x3CFF3D00
    elif odd:  # -(64 + z)
        word = z * 0x00100010 - 0x2BFF2C00
    else:  # 1024 + z
        word = z * 0x00010001 + 0x64006400
    return word[:, None]


@triton.jit
def part(
    words, bit: tl.constexpr, z, BITS: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """The bits from `bit` on, less the zero point."""
    n = (words >> bit) & ((1 << BITS) - 1)
    n = n - (z[:, None] if ZERO else 1 << (BITS - 1))
    return n.to(dtype)


@triton.jit
def interleave(low, high):
    """Two [outputs, 16], of even and odd columns -> [outputs, 32]."""
    return tl.join(low, high).reshape(low.shape[0], 32)


@triton.jit
def beside(left, right):
    """Two [outputs, columns] -> [outputs, 2 columns]."""
    both = tl.join(left, right).permute(0, 2, 1)
    return both.reshape(left.shape[0], 2 * left.shape[1])


SIXTEENFOLD = tl.constexpr("""{ .reg .b32 t;
shl.b32 t, $2, 4;
and.b32 $0, t, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0; }""")
_LESS_ZERO = (
    "lop3.b32 t, {0}, 0x0F0F0F0F, 0x80808080, 0xEA; sub.u32 t, t, $3; xor.b32 {1}, t, 0x80808080;"
)
LESS_ZERO = tl.constexpr(
    "{ .reg .b32 t, u;\nshr.u32 u, $2, 4;\n"
    + f"{_LESS_ZERO.format('$2', '$0')}\n{_LESS_ZERO.format('u', '$1')} }}"
)
# Of bytes u + 16 v, and m four times: the bytes (u - 8) m, and (v - 8) m.
_MULTIPLIED = (
    "and.b32 t, {0}, 0x0F0F0F0F; mad.lo.u32 t, t, m, c; xor.b32 {1}, t, 0x80808080;"  # its sign
)
MULTIPLIED = tl.constexpr(
    "{ .reg .b32 t, u, m, c;\nand.b32 m, $3, 31; mad.lo.u32 c, m, 0xF7F7F7F8, 0x80808080;\n"
    f"{_MULTIPLIED.format('$2', '$0')}\nshr.u32 u, $2, 4;\n{_MULTIPLIED.format('u', '$1')} }}"
)


@triton.jit
def operand(packed, z, ZERO: tl.constexpr, WARP: tl.constexpr):
    """Packed bytes [tiles, 32 group] -> int8 [outputs, group]: 16 q, or q - z if `ZERO`."""
    tiles: tl.constexpr = packed.shape[0]
    words: tl.constexpr = packed.shape[1] // 1024
    if ZERO:
        z = z.to(tl.int8).reshape(tiles, 4, 2, 8).permute(0, 2, 1, 3).reshape(tiles, 64, 1)
        z = tl.broadcast_to(z, (tiles, 64, 16 * words)).reshape(tiles, 1024 * words)
    if ASM and ZERO:
        low, high = tl.inline_asm_elementwise(
            LESS_ZERO, "=r,=r,r,r", [packed, z], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif ASM:
        low, high = tl.inline_asm_elementwise(
            SIXTEENFOLD, "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif ZERO:
        low, high = (packed & 15) - z, ((packed >> 4) & 15) - z
    else:
        low, high = packed << 4, packed & -16
    return rows_of(low, high, WARP)


@triton.jit
def multiplied_operand(packed, words, WARP: tl.constexpr):
    """Packed bytes [tiles, 4096] and words of multipliers [16 tiles, groups] -> int8 q m."""
    tiles: tl.constexpr = packed.shape[0]
    GROUPS: tl.constexpr = words.numel // (16 * tiles)
    place = tl.arange(0, 2)[:, None, None] * 16 + tl.arange(0, 2)[None, None, :] * 8  # b, c / 2, c
    m = words.reshape(tiles, 4, 1, 4, 1, GROUPS) >> place[None, None, :, :, :, None]
    m = (m & 31).to(tl.int8).permute(0, 2, 1, 3, 4, 5).reshape(tiles, 64, 1, GROUPS, 1)
    m = tl.broadcast_to(m, (tiles, 64, 4, GROUPS, 16 // GROUPS)).reshape(tiles, 4096)
    if ASM:
        low, high = tl.inline_asm_elementwise(
            MULTIPLIED, "=r,=r,r,r", [packed, m], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low, high = ((packed & 15) - 8) * m, (((packed >> 4) & 15) - 8) * m
    return rows_of(low, high, WARP)


@triton.jit
def rows_of(low, high, WARP: tl.constexpr):
    """What the halves of packed bytes [tiles, 32 group] became, in order: [outputs, group].

    If WARP, in the order of `as_warps_read`.
    """
    tiles: tl.constexpr = low.shape[0]
    words: tl.constexpr = low.shape[1] // 1024
    both = tl.join(low, high)  # b, a, c, quad, j, byte, half
    both = both.reshape(tiles, 2, 4, 8, 4, words, 4, 2)
    both = both.permute(0, 2, 1, 3, 5, 4, 7, 6) if WARP else both.permute(0, 2, 1, 3, 5, 7, 4, 6)
    return both.reshape(tiles * 64, 32 * words)


@triton.jit
def multipliers_of(words, g, N, MULTIPLIERS: tl.constexpr):
    """Multipliers of four outputs a word, of all groups of the g-th 128 inputs.

    As many words as threads would send the weight by shared memory: groups are loaded one by one.
    """
    s = tl.load(words + g * (N * MULTIPLIERS // 4))
    if MULTIPLIERS == 2:
        s = tl.join(s, tl.load(words + 1 + g * (N // 2)))
    elif MULTIPLIERS == 4:
        odd = tl.join(tl.load(words + 1 + g * N), tl.load(words + 3 + g * N))
        s = tl.join(tl.join(s, tl.load(words + 2 + g * N)), odd)
    return s


@triton.jit
def operand_and_scale(w, s, ZERO: tl.constexpr, WARP: tl.constexpr):
    """Packed bytes to int8, and scales [outputs] without the zero points that lie in them."""
    if ZERO:
        w = operand(w, s & 15, ZERO, WARP)
        s = (s & -16).to(tl.float32, bitcast=True)
    else:
        w = operand(w, 0, ZERO, WARP)
    return w, s
