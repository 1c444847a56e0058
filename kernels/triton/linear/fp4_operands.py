"""e2m1 weights, packed so that a shift and a mask make floats of two: operands of the tensor cores.

Words lie as those of 4-bit integers (`kernels.triton.linear.operands`): word t of an output has its
inputs k = 32 j + 2 t + h of 128. Within a word the bits have an order of their own. An element is
a sign, two bits of exponent and one of mantissa; these four bits, where a float has its sign, the
last bits of its exponent and the first of its mantissa, are that float of 2^-126 (bf16) or 2^-14
(fp16) times the element, the subnormal 0.5 too. So the elements h = 0 and 1 of a j lie as both
halves of a rotated word have them. `ROTATIONS` are those (to the right) by which 32 bits hold four
such pairs, and nine (bf16) or ten (fp16) instructions make floats of them.

A scale is a byte of five bits of exponent and three of mantissa, u = 8 e + m for (8 + m) 2^(e-32),
times a number that an output's scales share: powers of two, over 28 octaves, and all e4m3 values
are such. A product makes it a pair of floats of what the elements lack, and weights times scales
are exact (in fp16 from 2^-24 on, the smallest that it has).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import ASM
from kernels.triton.linear.operands import beside, interleave, words_of
from kernels.triton.linear.packing import BLOCK

# Of pairs j = 0 to 3: rotations for the three bits of magnitude, the lowest first, and the sign.
ROTATIONS = {
    torch.bfloat16: ((26,) * 4, (4,) * 4, (30,) * 4, (8, 0, 0, 0)),
    torch.float16: ((23,) * 4, (4,) * 4, (27, 27, 0, 27), (0, 29, 29, 29)),
}
TARGETS = {torch.bfloat16: (6, 7, 8, 15), torch.float16: (9, 10, 11, 15)}  # of a float's bits
BOTH = 0x00010001
LARGEST_BYTE = 0xF7  # a larger exponent is that of infinity


def _turned(source: str, rotation: int, targets: list[int]) -> str:
    """`t`, a word rotated so that some bits of both halves are right; by a shift if it can."""
    places = [16 * half + bit + rotation for half in (0, 1) for bit in targets]
    if min(places) >= 32:
        return f"shl.b32 t, {source}, {32 - rotation};"
    if max(places) < 32:
        return f"shr.u32 t, {source}, {rotation};"
    return f"shf.r.wrap.b32 t, {source}, {source}, {rotation};"


def pair(dtype: torch.dtype, j: int, source: str) -> str:
    """Assembly for `a`, the j-th pair of a word without its scale; `t` is a free register."""
    groups: dict[int, list[int]] = {}
    for rotation, bit in zip(ROTATIONS[dtype][j], TARGETS[dtype], strict=True):
        groups.setdefault(rotation, []).append(bit)
    lines = []
    for i, (rotation, bits) in enumerate(sorted(groups.items())):
        mask = sum(BOTH << bit for bit in bits)
        if rotation:
            lines.append(_turned(source, rotation, bits))
        turned = "t" if rotation else source
        lines.append(
            f"lop3.b32 a, {turned}, {mask:#010x}, a, 0xEA;"
            if i
            else f"and.b32 a, {turned}, {mask:#010x};"
        )
    return " ".join(lines)


def _assembly(dtype: torch.dtype, times: str) -> str:
    """A word's eight elements, by a pair of scales for two each, as four pairs of floats."""
    lines = [".reg .b32 a, t, none;", "mov.b32 none, 0x80008000;"]
    for j in range(4):
        scaled = times.format(f"${9 + j}")
        lines.append(f"{pair(dtype, j, '$8')} {scaled} mov.b32 {{${2 * j}, ${2 * j + 1}}}, a;")
    return "{ " + "\n".join(lines) + " }"


FP16_8 = tl.constexpr(_assembly(torch.float16, "mul.rn.f16x2 a, a, {};"))
BF16_8 = tl.constexpr(_assembly(torch.bfloat16, "fma.rn.bf16x2 a, a, {}, none;"))


def pack_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes uint8 [N, K], sign, exponent, mantissa -> int32 [K / 128, N / 64, 1024] for a type."""
    *experts, outputs, inputs = codes.shape
    tiles, blocks = outputs // 64, inputs // BLOCK
    # of output 16 a + 8 b + c of a tile: [expert, tile, a, b, c, block, j, t / 4, t % 4, h]
    parts = codes.reshape(-1, tiles, 4, 2, 8, blocks, 4, 4, 4, 2)
    parts = parts.permute(0, 5, 1, 3, 2, 4, 8, 7, 6, 9)
    words = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=codes.device)
    for j in range(4):
        for half in (0, 1):
            own = parts[..., j, half].int()
            for i, (rotation, bit) in enumerate(
                zip(ROTATIONS[dtype][j], TARGETS[dtype], strict=True)
            ):
                words |= (own >> i & 1) << (16 * half + bit + rotation) % 32
    return words.reshape(*experts, blocks, tiles, 1024)


def bytes_of(multiples: Tensor) -> Tensor:
    """The byte of each fp32 number as above, of too small or too large ones the nearest: int32."""
    return ((multiples.contiguous().view(torch.int32) >> 20) - (98 << 3)).clamp(8, LARGEST_BYTE)


def multiples_of(found: Tensor) -> Tensor:
    """Inverse of `bytes_of`."""
    return ((found + (98 << 3)) << 20).view(torch.float32)


@triton.jit
def scale_pair(word, j: tl.constexpr, dtype: tl.constexpr):
    """Byte j of words, with what elements lack: two equal floats in a word."""
    byte = (word >> (8 * j)) & 255
    return byte * 0x00800080 if dtype == tl.float16 else byte * 0x00100010 + 0x70007000


@triton.jit
def rotated(words, by: tl.constexpr):
    """uint32 rotated to the right."""
    return (words >> by) | (words << (32 - by))


@triton.jit
def elements(words, scales, j: tl.constexpr, dtype: tl.constexpr):
    """The j-th pair of each word, times their scales: of h = 0 and of h = 1."""
    words = words.to(tl.uint32, bitcast=True)
    if dtype == tl.float16:
        if j == 0:
            both = rotated(words, 23)
        elif j == 1:
            both = rotated(words, 4)
        elif j == 2:
            both = (words & 0x08000800) | (rotated(words, 27) & 0x86008600)
        else:
            both = (words & 0x02000200) | (rotated(words, 29) & 0x8C008C00)
        both &= 0x8E008E00
    else:
        if j == 0:
            both = rotated(words, 26)
        elif j == 1:
            both = rotated(words, 4)
        elif j == 2:
            both = rotated(words, 30)
        else:
            both = (words & 0x81808180) | (rotated(words, 8) & 0x00400040)
        both &= 0x81C081C0
    scale = (scales & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    low = (both & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return low * scale, high * scale


@triton.jit
def own_scales(first, second, j: tl.constexpr, HALVES: tl.constexpr, dtype: tl.constexpr):
    """Pairs of scales of the j-th quarter for words [outputs, 16]; its halves may differ."""
    pairs = scale_pair(first, j, dtype)[:, None]
    if HALVES == 2:
        others = scale_pair(second, j, dtype)[:, None]
        pairs = tl.where(tl.arange(0, 16)[None, :] < 8, pairs, others)
    return pairs


@triton.jit
def weights_of(
    words, first, second, HALVES: tl.constexpr, dtype: tl.constexpr, WARP: tl.constexpr
):  # fmt: skip
    """Packed tiles [tiles, 1024] and words of scales -> weights [outputs, 128] in a type.

    If WARP, inputs are in the order of `kernels.triton.linear.operands.as_warps_read`.
    """
    half = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    words = words_of(words, WARP)
    s0 = own_scales(first, second, 0, HALVES, dtype)
    s1 = own_scales(first, second, 1, HALVES, dtype)
    s2 = own_scales(first, second, 2, HALVES, dtype)
    s3 = own_scales(first, second, 3, HALVES, dtype)
    if ASM:
        l0, h0, l1, h1, l2, h2, l3, h3 = tl.inline_asm_elementwise(
            BF16_8 if dtype == tl.bfloat16 else FP16_8,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
            [words, s0, s1, s2, s3],
            dtype=(half, half, half, half, half, half, half, half),
            is_pure=True,
            pack=1,
        )
    else:
        l0, h0 = elements(words, s0, 0, dtype)
        l1, h1 = elements(words, s1, 1, dtype)
        l2, h2 = elements(words, s2, 2, dtype)
        l3, h3 = elements(words, s3, 3, dtype)
    low = beside(interleave(l0, h0), interleave(l1, h1))
    return beside(low, beside(interleave(l2, h2), interleave(l3, h3)))
