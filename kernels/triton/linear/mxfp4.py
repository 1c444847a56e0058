"""Linear layers of MXFP4 weights and fp16 or bf16 activations: W4(E2M1)A16, groups of 32.

    y[m, n] = sum_g 2^(E[g, n] - 127) sum_{k in g} x[m, k] w[n, k] + b[n]

An element is a sign, two bits of exponent and one of mantissa. These four bits, put where a float
has its sign, the last bits of its exponent and the first of its mantissa, are that float of 2^-126
(bf16) or 2^-14 (fp16) times the element, the subnormal 0.5 too: a shift and a mask for two weights.
A scale is the float of its exponent and of that factor, and weights times scales are exact (in fp16
from 2^-24 on, the smallest that it has).

Weights lie as other 4-bit ones (`kernels.triton.linear.operands`), codes of elements in the place
of integers; the scales of 128 inputs are the four bytes of a word, [K / 128, N]. Inputs that are no
multiple of 128 are filled up with zeros in memory, and x is read up to its end.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import ASM, announce, require, wait
from kernels.triton.experts.sorting import SortedRows
from kernels.triton.linear.launch import Product, fitting, launch_few_rows
from kernels.triton.linear.operands import beside, interleave, pack_tiles
from kernels.triton.linear.packing import BLOCK, lay_bias
from kernels.triton.linear.tiles import rows_of_tile, store_tile, sum_tile
from kernels.triton.linear.weight import GpuWeight, check_inputs
from kernels.triton.tuning import Tile, shared_memory

GROUP = 32
LARGEST_SCALE = 2.0  # of bf16 with the factor 2^126
FLOATS = (torch.float16, torch.bfloat16)


def _assembly(magnitude: int, mask: str, times: str) -> str:
    """A word's eight elements, by a scale for two each, as four pairs of 16-bit floats.

    Args:
        magnitude: The place in a float of the three bits of exponent and mantissa.
        mask: Of these in both halves of a word.
        times: Multiplies the pair `a` by a pair of equal scales.
    """
    lines = [".reg .b32 a, t, none;", "mov.b32 none, 0x80008000;"]
    for j in range(4):
        shift = magnitude - 4 * j
        by = f"shl.b32 a, $8, {shift};" if shift >= 0 else f"shr.u32 a, $8, {-shift};"
        lines.append(
            f"{by} and.b32 a, a, {mask}; shl.b32 t, $8, {12 - 4 * j}; "
            f"lop3.b32 a, t, none, a, 0xEA; {times.format(f'${9 + j}')} "
            f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, a;"
        )
    return "{ " + "\n".join(lines) + " }"


FP16_8 = tl.constexpr(_assembly(9, "0x0E000E00", "mul.rn.f16x2 a, a, {};"))
BF16_8 = tl.constexpr(_assembly(6, "0x01C001C0", "fma.rn.bf16x2 a, a, {}, none;"))


@triton.jit
def scales_of(word, i: tl.constexpr, dtype: tl.constexpr):
    """Scales of quarter i with what its elements lack: two equal floats in a word, [outputs, 1]."""
    exponent = (word >> (8 * i)) & 255
    if dtype == tl.float16:  # 2^14 times it; none where no weight of the group reaches 2^-25
        exponent = tl.maximum(exponent - 98, 0) << 3
    else:  # 2^126 times the scale
        exponent += 126
    return (exponent * 0x00800080)[:, None]


@triton.jit
def element(words, scales, bit: tl.constexpr, dtype: tl.constexpr):
    """The elements from `bit` on, times their scales."""
    n = (words >> bit) & 15
    place: tl.constexpr = 9 if dtype == tl.float16 else 6
    bits = ((n & 7) << place) | ((n & 8) << 12)
    scale = (scales & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return bits.to(tl.int16).to(dtype, bitcast=True) * scale


@triton.jit
def weights_of(words, word, dtype: tl.constexpr):
    """Packed tiles [tiles, 1024] and their scales -> weights [outputs, 128] in a type."""
    tiles: tl.constexpr = words.shape[0]
    half = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    words = words.reshape(tiles, 2, 4, 8, 4, 4).permute(0, 2, 1, 3, 5, 4)
    words = words.reshape(tiles * 64, 16)
    s0, s1 = scales_of(word, 0, dtype), scales_of(word, 1, dtype)
    s2, s3 = scales_of(word, 2, dtype), scales_of(word, 3, dtype)
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
        l0, h0 = element(words, s0, 0, dtype), element(words, s0, 16, dtype)
        l1, h1 = element(words, s1, 4, dtype), element(words, s1, 20, dtype)
        l2, h2 = element(words, s2, 8, dtype), element(words, s2, 24, dtype)
        l3, h3 = element(words, s3, 12, dtype), element(words, s3, 28, dtype)
    low = beside(interleave(l0, h0), interleave(l1, h1))
    return beside(low, beside(interleave(l2, h2), interleave(l3, h3)))


@triton.jit(do_not_specialize=["M"])
def mxfp4_kernel(
    x, packed, scale, bias, out, parts, arrivals, experts, pairs, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows).

    With `experts` a tile of rows is one of an expert, and weights lie one behind the other. REST is
    whether the last 128 inputs are not all there.
    """
    DT: tl.constexpr = x.dtype.element_ty
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(K, 128)
    share = tl.cdiv(blocks, SPLITS)
    first = split * share
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, m, row, own = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (blocks * N * 16)
        scale += expert * (blocks * N)
        if BIAS:
            bias += expert * N
    real = own[None, :]
    words = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * 1024
    words = packed + words + tl.arange(0, 1024)[None, :]
    k = tl.arange(0, 128)[:, None]
    columns = x + row[None, :] * K + k  # x transposed
    wait(OVERLAP)
    announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        w = tl.load(words + g * (N * 16), eviction_policy="evict_first")
        word = tl.load(scale + g * N + n)
        there = real & (k < K - g * 128) if REST else real
        xt = tl.load(columns + g * 128, mask=there, other=0.0)
        acc = tl.dot(weights_of(w, word, DT), xt, acc)
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        if BIAS:
            acc += tl.load(bias + n)[:, None]
        store_tile(acc, out, m, n, N, real)


@dataclass(frozen=True)
class Mxfp4Weight(GpuWeight):
    """A weight in MXFP4, for float rows.

    Attributes:
        packed: int32 [ceil(K / 128), N / 64, 1024].
        scale: int32 [ceil(K / 128), N], the exponents of four groups in a word, the first lowest.
        bias: fp32 [N] or None.
        inputs: K.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    inputs: int

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernel."""
        return "w4a16_mxfp4"

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.scale.shape[-1], self.inputs

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 128

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are floats of K inputs."""
        check_inputs(x, FLOATS, self.inputs)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says, with stages that fit."""
        tile = super().few_rows_tile(x, sorted_rows)
        return fitting(tile, 68, 256, 0, shared_memory(x.device))

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel."""
        launch_few_rows(
            mxfp4_kernel, (product.x, self.packed, self.scale), self.bias, product, tile,
            REST=self.inputs % BLOCK != 0,
        )  # fmt: skip


def fits_mxfp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes codes [N, K] with these scales and rows of a type."""
    outputs, inputs = codes.shape[-2:]
    whole = outputs % 64 == 0 and inputs == GROUP * scale.shape[-1]
    return whole and dtype in FLOATS and bool((scale <= LARGEST_SCALE).all())


def codes_of_e4m3(elements: Tensor) -> Tensor:
    """The four bits of each element that is held as e4m3, of whose values e2m1 has some: uint8.

    Exponents of e4m3 are 6 larger; only 0.5 has a leading one there and none in e2m1.
    """
    bits = elements.contiguous().view(torch.uint8)
    magnitude = (bits & 0x7F) >> 2  # exponent and first bit of the mantissa
    half, one = 12, 14
    codes = (magnitude.clamp(min=one) - half) * (magnitude >= one) + (magnitude == half)
    return codes.to(torch.uint8) | (bits >> 4 & 8)


def pack_mxfp4(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Mxfp4Weight:
    """Lay a weight out, on the device it is on.

    Args:
        codes: uint8 [N, K], the four bits of each element: sign, exponent, mantissa; N a multiple
            of 64, K of 32; or of E weights alike, [E, N, K], all else likewise.
        scale: fp32 [N, K / 32], powers of two up to 2.
        bias: Float [N] or None.

    Raises:
        ValueError: a shape, type or value is another.
    """
    *_, inputs = codes.shape
    require(
        codes.dtype == torch.uint8 and fits_mxfp4(codes, scale, torch.bfloat16),
        f"codes are {codes.dtype} {tuple(codes.shape)}, scales {tuple(scale.shape)}; needed are "
        f"uint8 [N, K] and [N, K / {GROUP}], N in 64s, scales up to {LARGEST_SCALE:g}",
    )
    rest = -inputs % BLOCK
    q = F.pad(codes.view(torch.int8), (0, rest)) - 8
    exponents = F.pad(scale.float().contiguous().view(torch.int32) >> 23, (0, rest // GROUP))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    words = (exponents.unflatten(-1, (-1, 4)) << shifts).sum(-1, dtype=torch.int32)
    return Mxfp4Weight(pack_tiles(q, 4), words.mT.contiguous(), lay_bias(bias, codes), inputs)
