"""W4A16: 4-bit weights in groups of 128 inputs, fp16 or bf16 activations.

    y[m, n] = sum_g s[g, n] sum_{k in g} x[m, k] q[n, k] + b[n],        q in [-8, 7].

The weight is the left operand of the product, so that it goes from memory to the tensor cores
through registers alone: the transposed tile acc[n, m] is summed. A packed tile is 64 outputs by 128
inputs, 4 KB, in the order in which the 128 threads of a warpgroup hold it as operand: 16 bytes a
thread and load, nothing is shuffled. Word t of an output holds inputs k = 32 j + 2 t + h at bits
4 j + 16 h, as q + 8; a mask and an `or` turn two of them into two floats 1024 + n (fp16) or 128 + n
(bf16), from which 1032 or 136 is taken. Tiles are stored [K / 128, N / 64, 1024]: at one step all
programs read one contiguous stretch.

Up to 64 rows the group's scale multiplies its fp32 sum; from there on the weights, rounded to the
type of x, which is less work and costs half a unit of the last place a weight. Beyond
`LIBRARY_ROWS` the weight is dequantized to a passing copy, and cuBLAS does the rest.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import ASM, Workspace, require, sum_splits
from kernels.triton.tuning import Tile, gemm_tile

GROUP = 128
LIBRARY_ROWS = 512
FP16 = tl.constexpr("""{ .reg .b32 a, t, bias, part, high;
mov.b32 bias, 0x64086408;
mov.b32 part, 0x2C002C00;
mov.b32 high, 0xD480D480;
shr.u32 t, $8, 8;
lop3.b32 a, $8, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 a, a, bias; mov.b32 {$0, $1}, a;
lop3.b32 a, $8, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 a, a, part, high; mov.b32 {$2, $3}, a;
lop3.b32 a, t, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 a, a, bias; mov.b32 {$4, $5}, a;
lop3.b32 a, t, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 a, a, part, high; mov.b32 {$6, $7}, a;
}""")  # the second and fourth are 1024 + 16 n: a sixteenth of it less 72
_STEP = "lop3.b32 a, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 a, a, one, bias;"
BF16 = tl.constexpr(
    "{ .reg .b32 a, t, one, bias;\nmov.b32 one, 0x3F803F80;\nmov.b32 bias, 0xC308C308;\n"
    + "".join(
        f"shr.u32 t, $8, {4 * j}; {_STEP} mov.b32 {{${2 * j}, ${2 * j + 1}}}, a;\n"
        for j in range(4)
    )
    + "}"
)  # bf16 has no room for 16 n in its fraction; its only packed sum before sm_90 is the fma
CONSTRAINTS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")


@dataclass(frozen=True)
class W4A16Weight:
    """A weight packed for `w4a16_linear`.

    Attributes:
        packed: int32 [K / 128, N / 64, 1024].
        scale: fp16, bf16 or fp32 [K / 128, N].
        bias: fp32 [N] or None.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(t.nbytes for t in (self.packed, self.scale, self.bias) if t is not None)


def check_int4(q: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless `q` is int8 [N, K] in [-8, 7] and `scale` [N, K / 128] fits it."""
    require(
        q.dim() == 2 and q.dtype == torch.int8 and q.shape[0] % 64 == 0 and q.shape[1] % GROUP == 0,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is int8 [N, K], N in 64s and K in {GROUP}s",
    )
    require(bool((q >= -8).all() and (q <= 7).all()), "weight has values outside of [-8, 7]")
    wanted = (q.shape[0], q.shape[1] // GROUP)
    require(
        tuple(scale.shape) == wanted and scale.is_floating_point(),
        f"scales are {scale.dtype} {tuple(scale.shape)}; needed are floats {wanted}, one for "
        f"each group of {GROUP} inputs",
    )


def pack_w4a16(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> W4A16Weight:
    """Lay a quantized weight out for `w4a16_linear`, on the device it is on.

    Args:
        q: int8 [N, K] in [-8, 7]; N a multiple of 64, K of 128.
        scale: Float [N, K / 128]; its type is kept. fp32 is faster: of tiles of fewer than 256
            outputs 16-bit scales are too small for asynchronous loads, and are waited for.
        bias: Float [N] or None.

    Raises:
        ValueError: a shape, type or value is another.
    """
    check_int4(q, scale)
    outputs, inputs = q.shape
    nibbles = (q.view(outputs, inputs // GROUP, 4, 16, 2) + 8).to(torch.int32)  # n, g, j, t, h
    shift = torch.tensor([[4 * j + 16 * h for h in range(2)] for j in range(4)], device=q.device)
    words = (nibbles << shift.view(1, 1, 4, 1, 2)).sum((2, 4), dtype=torch.int32)  # no bit twice
    words = words.view(outputs // 64, 4, 2, 8, inputs // GROUP, 4, 4)  # n = 16 a + 8 b + c
    packed = words.permute(4, 0, 2, 1, 3, 6, 5).reshape(inputs // GROUP, outputs // 64, 1024)
    bias = None if bias is None else bias.float().contiguous()
    return W4A16Weight(packed.contiguous(), scale.t().contiguous(), bias)


@triton.jit
def operand(words, dtype: tl.constexpr):
    """Packed words [tiles, 1024] -> weights [outputs, 128] of a type: registers get new names."""
    tiles: tl.constexpr = words.shape[0]
    words = words.reshape(tiles, 2, 4, 8, 4, 4).permute(0, 2, 1, 3, 5, 4).reshape(tiles * 64, 16)
    half = (
        tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    )  # not a constexpr, which a tuple bars
    if ASM:
        a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
            BF16 if dtype == tl.bfloat16 else FP16,
            CONSTRAINTS,
            [words],
            dtype=(half, half, half, half, half, half, half, half),
            is_pure=True,
            pack=1,
        )
    else:
        a0, b0 = nibble(words, 0, dtype), nibble(words, 16, dtype)
        a1, b1 = nibble(words, 4, dtype), nibble(words, 20, dtype)
        a2, b2 = nibble(words, 8, dtype), nibble(words, 24, dtype)
        a3, b3 = nibble(words, 12, dtype), nibble(words, 28, dtype)
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))  # [outputs, t, h, j / 2] of even j
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.join(even, odd).permute(0, 3, 4, 1, 2).reshape(tiles * 64, 128)


@triton.jit
def nibble(words, bit: tl.constexpr, dtype: tl.constexpr):
    """The 4 bits from `bit` on, less 8."""
    return (((words >> bit) & 15) - 8).to(dtype)


@triton.jit(do_not_specialize=["M"])
def w4a16_kernel(
    x, packed, scale, bias, out, parts, arrivals, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SCALE_WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows)."""
    DT: tl.constexpr = x.dtype.element_ty
    tile, split, strip = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // 128, SPLITS)
    first = split * share
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = strip * ROWS + tl.arange(0, ROWS)
    real = (m < M)[None, :]
    words = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * 1024
    words = packed + words + tl.arange(0, 1024)[None, :]
    columns = x + m[None, :] * K + tl.arange(0, 128)[:, None]  # [128, ROWS], x transposed
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, K // 128), num_stages=STAGES):
        w = tl.load(words + g * (N * 16), eviction_policy="evict_first")
        s = tl.load(scale + g * N + n)
        xt = tl.load(columns + g * 128, mask=real, other=0.0)
        w = operand(w, DT)
        if SCALE_WEIGHT:
            acc = tl.dot(w * s.to(DT)[:, None], xt, acc)
        else:
            acc += tl.dot(w, xt) * s.to(tl.float32)[:, None]
    last = True
    if SPLITS > 1:
        own = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        number = strip * tl.num_programs(0) + tile
        acc, last = sum_splits(acc, parts, arrivals, number, split, own, real, SPLITS)
    if last:
        if BIAS:
            acc += tl.load(bias + n)[:, None]
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def dequantize_kernel(packed, scale, out, N, K):
    """Program (tile of 64 outputs, group of 128 inputs)."""
    tile, group = tl.program_id(0), tl.program_id(1)
    words = packed + (group * (N // 64) + tile) * 1024 + tl.arange(0, 1024)[None, :]
    n = tile * 64 + tl.arange(0, 64)
    w = operand(tl.load(words, eviction_policy="evict_first"), out.dtype.element_ty)
    w *= tl.load(scale + group * N + n).to(out.dtype.element_ty)[:, None]
    k = group * 128 + tl.arange(0, 128)
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], w)


def dequantize_w4a16(weight: W4A16Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16 or bf16, scale and product rounded to it."""
    groups, outputs = weight.scale.shape
    out = torch.empty((outputs, groups * GROUP), dtype=dtype, device=weight.packed.device)
    dequantize_kernel[(outputs // 64, groups)](
        weight.packed, weight.scale, out, outputs, groups * GROUP
    )
    return out


def w4a16_linear(
    x: Tensor, weight: W4A16Weight, workspace: Workspace, tile: Tile | None = None
) -> Tensor:
    """x W^T + bias.

    Args:
        x: fp16 or bf16 [M, K], contiguous.
        weight: From `pack_w4a16`, on the device of `x`.
        workspace: Of the stream that this runs in.
        tile: How to cut it; by default the device's table says.

    Returns:
        [M, N] in the type of `x`; sums in fp32.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    (rows, inputs), outputs = x.shape, weight.scale.shape[1]
    require(
        x.dtype in (torch.float16, torch.bfloat16) and x.is_contiguous(),
        f"x is {x.dtype}; needed is contiguous float16 or bfloat16",
    )
    require(
        inputs == weight.packed.shape[0] * GROUP,
        f"x has {inputs} inputs, the weight {weight.packed.shape[0] * GROUP}",
    )
    if tile is None and rows > LIBRARY_ROWS:
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        return F.linear(x, dequantize_w4a16(weight, x.dtype), bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = tile or gemm_tile("w4a16", x.device, rows, outputs, inputs)
    grid = (outputs // tile.outputs, tile.splits, triton.cdiv(rows, tile.rows))
    require(outputs % tile.outputs == 0, f"{outputs} outputs are no multiple of {tile.outputs}")
    if tile.splits > 1:
        workspace.check(grid[0] * grid[1] * grid[2] * tile.outputs * tile.rows, grid[0] * grid[2])
    w4a16_kernel[grid](
        x, weight.packed, weight.scale, weight.bias, out, workspace.parts, workspace.arrivals,
        rows, outputs, inputs, OUTPUTS=tile.outputs, ROWS=tile.rows, SPLITS=tile.splits,
        STAGES=tile.stages, SCALE_WEIGHT=tile.rows > 64, BIAS=weight.bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
