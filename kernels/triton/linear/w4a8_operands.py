"""Packed 4-bit weights as int8 operands: 16 q, q - z, or q m; layouts are those of `w4a8`."""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.common import ASM

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

    If WARP, in the order of `kernels.triton.linear.operands.as_warps_read`.
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
