"""4-bit weights from packed words in registers to operands of wgmma in registers (Gluon).

Layouts are chosen so that no value changes its thread: packed tiles as
`kernels.triton.linear.weight_only` and `kernels.triton.linear.w4a8` lay them, 16 bytes a thread and
load, become the left operand.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.linear.fp4_operands import pair as _pair
from kernels.triton.linear.operands import MULTIPLIED as _MULTIPLIED
from kernels.triton.linear.operands import SIXTEENFOLD as _SIXTEENFOLD

MULTIPLIED = gl.constexpr(_MULTIPLIED.value)
SIXTEENFOLD = gl.constexpr(_SIXTEENFOLD.value)

# Bits 0 to 7 of both halves of a word, less 8 and times the scale, in fp16 and in bf16.
FP16 = gl.constexpr("""{ .reg .b32 a, bias, part, high;
mov.b32 bias, 0x64086408; mov.b32 part, 0x2C002C00; mov.b32 high, 0xD480D480;
lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 a, a, bias; mul.rn.f16x2 a, a, $5; mov.b32 {$0, $1}, a;
lop3.b32 a, $4, 0x00F000F0, 0x64006400, 0xEA;
fma.rn.f16x2 a, a, part, high; mul.rn.f16x2 a, a, $5; mov.b32 {$2, $3}, a; }""")
BF16 = gl.constexpr("""{ .reg .b32 a, t, bias;
mov.b32 bias, 0x43084308;
lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, bias; mul.rn.bf16x2 a, a, $5; mov.b32 {$0, $1}, a;
shr.u32 t, $4, 4;
lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, bias; mul.rn.bf16x2 a, a, $5; mov.b32 {$2, $3}, a; }""")


def _fp4(dtype: torch.dtype, chunk: int) -> str:
    """Two of the four pairs of a word of e2m1 elements, each times its pair of scales."""
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    lines = [
        f"{_pair(dtype, 2 * chunk + i, '$4')} mul.rn.{kind} a, a, ${5 + i}; "
        f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, a;"
        for i in (0, 1)
    ]
    return "{ .reg .b32 a, t;\n" + "\n".join(lines) + " }"


FP4_FP16_LOW = gl.constexpr(_fp4(torch.float16, 0))
FP4_FP16_HIGH = gl.constexpr(_fp4(torch.float16, 1))
FP4_BF16_LOW = gl.constexpr(_fp4(torch.bfloat16, 0))
FP4_BF16_HIGH = gl.constexpr(_fp4(torch.bfloat16, 1))
_LANES = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [16, 0]], _LANES, [[4, 0], [8, 0]], [], [32, 32])
)  # int32 [32, 32], a packed tile of 64 outputs: 16 bytes a thread and load
BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [16, 0]],
        [[row, 4 * column] for row, column in _LANES],
        [[4, 0], [8, 0]],
        [],
        [32, 128],
    )
)  # the same tile as int8 [32, 128]


@gluon.jit
def float_operand(words, scale, CHUNK: gl.constexpr, dtype: gl.constexpr):
    """Words [64 outputs, 16], doubled scales [64, 1] -> weights [64, 64], the CHUNK-th inputs."""
    if CHUNK == 1:
        words = words >> 8
    half = gl.bfloat16 if dtype == gl.bfloat16 else gl.float16
    a0, b0, a1, b1 = gl.inline_asm_elementwise(
        BF16 if dtype == gl.bfloat16 else FP16,
        "=h,=h,=h,=h,r,r",
        [words, scale],
        dtype=(half, half, half, half),
        is_pure=True,
        pack=1,
    )
    w = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [outputs, t, j, h]
    return w.permute([0, 2, 1, 3]).reshape([64, 64])


@gluon.jit
def fp4_operand(words, scale, CHUNK: gl.constexpr, dtype: gl.constexpr):
    """Words [64 outputs, 16] of e2m1 elements, words of scales -> weights [64, 64] as above."""
    s0 = own_scales(words, scale, 2 * CHUNK, dtype)
    s1 = own_scales(words, scale, 2 * CHUNK + 1, dtype)
    half = gl.bfloat16 if dtype == gl.bfloat16 else gl.float16
    BF16_2: gl.constexpr = FP4_BF16_LOW if CHUNK == 0 else FP4_BF16_HIGH
    FP16_2: gl.constexpr = FP4_FP16_LOW if CHUNK == 0 else FP4_FP16_HIGH
    a0, b0, a1, b1 = gl.inline_asm_elementwise(
        BF16_2 if dtype == gl.bfloat16 else FP16_2,
        "=h,=h,=h,=h,r,r,r",
        [words, s0, s1],
        dtype=(half, half, half, half),
        is_pure=True,
        pack=1,
    )
    w = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [outputs, t, j, h]
    return w.permute([0, 2, 1, 3]).reshape([64, 64])


@gluon.jit
def own_scales(words, scale, j: gl.constexpr, dtype: gl.constexpr):
    """Pairs of scales of the j-th 32 inputs for words [64, 16]; the halves of these may differ."""
    pairs = gl.expand_dims(scale_pair(scale[0], j, dtype), 1)
    if len(scale) == 2:
        t = gl.arange(0, 16, layout=gl.SliceLayout(0, words.type.layout))
        others = gl.expand_dims(scale_pair(scale[1], j, dtype), 1)
        pairs = gl.where(gl.expand_dims(t < 8, 0), pairs, others)
    return pairs


@gluon.jit
def scale_pair(word, j: gl.constexpr, dtype: gl.constexpr):
    """Byte j of words, as `kernels.triton.linear.fp4_operands.scale_pair` gives it."""
    byte = (word >> (8 * j)) & 255
    return byte * 0x00800080 if dtype == gl.float16 else byte * 0x00100010 + 0x70007000


@gluon.jit
def int_operand(packed):
    """Packed bytes [32, 128] -> sixteenfold weights int8 [64 outputs, 128]."""
    low, high = gl.inline_asm_elementwise(
        SIXTEENFOLD, "=r,=r,r", [packed], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    return in_order(low, high)


@gluon.jit
def in_order(low, high):
    """What the halves of packed bytes [32, 128] became -> [64 outputs, 128]."""
    w = gl.join(low, high).reshape([2, 4, 8, 4, 4, 4, 2])  # b, a, c, quad, j, byte, half
    return w.permute([1, 0, 2, 4, 6, 3, 5]).reshape([64, 128])


@gluon.constexpr_function
def byte_layouts(GROUPS):
    """Of multipliers in the order of memory, and of the tile as [(b, a, c), quad, groups, rest]."""
    runs = [[4], [8]][: GROUPS.bit_length() - 1]
    own = gl.DistributedLinearLayout(
        [[2], *runs], [[0], [0], [1], [4 * GROUPS], [8 * GROUPS]], [[16 * GROUPS], [32 * GROUPS]],
        [], [64 * GROUPS],
    )  # fmt: skip
    rest = 16 // GROUPS
    columns = [[0, 0, i // rest, i % rest] for i in (1, 2, 4, 8)]
    tile = gl.DistributedLinearLayout(
        [*columns, [32, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[8, 0, 0, 0], [16, 0, 0, 0]], [], [64, 4, GROUPS, rest],
    )  # fmt: skip
    return own, tile


@gluon.jit
def own_multipliers(ring, GROUPS: gl.constexpr):
    """Multipliers of 64 outputs from shared memory, int8 [(b, a, c), 1, groups, 1]."""
    LAYOUTS: gl.constexpr = byte_layouts(GROUPS)
    m = ring.load(LAYOUTS[0]).reshape([4, 4, GROUPS, 2, 2])  # a, c / 2, group, b, c % 2
    m = m.permute([3, 0, 1, 4, 2]).reshape([64, GROUPS])
    FLAT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUTS[1]))
    m = gl.convert_layout(m, FLAT, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(m, 1), 3)


@gluon.jit
def exact_operand(packed, m, GROUPS: gl.constexpr):
    """Packed bytes [32, 128] and `own_multipliers` -> int8 [64 outputs, 128]: q m."""
    LAYOUTS: gl.constexpr = byte_layouts(GROUPS)
    tile = packed.reshape([64, 4, GROUPS, 16 // GROUPS])
    tile = gl.convert_layout(tile, LAYOUTS[1], assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        MULTIPLIED, "=r,=r,r,r", [tile, m], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    return in_order(low, high)


@gluon.jit
def doubled(scale, dtype: gl.constexpr):
    """Scales [64] -> words [64, 1] that hold each twice, in the type of x."""
    word = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $1;",
        "=r,r",
        [scale.to(gl.float32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.expand_dims(word, 1)
