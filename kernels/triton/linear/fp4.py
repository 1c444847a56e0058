"""Linear layers of fp4 weights and fp16 or bf16 activations: W4(E2M1)A16, of NVFP4 and MXFP4.

    y[m, n] = u[n] sum_g s[n, g] sum_{k in g} x[m, k] w[n, k] + b[n]

A group is 16 inputs (NVFP4, s an e4m3 value) or 32 (MXFP4, s a power of two). How weights and their
scales lie, and become operands, says `kernels.triton.linear.fp4_operands`: the product of both is
exact, u multiplies the sum. The scales of 128 inputs are the bytes of one word or of two: of MXFP4
[K / 128, N]; of NVFP4 [K / 128, N / 64, 2, 64], of the first 16 of each 32 inputs and the second.

Inputs that are no multiple of 128 are filled up with zeros in memory, and x is read up to its end.
On sm_90 more than some tens of rows go to `kernels.triton.linear.hopper.w4`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import require, wait_and_announce
from kernels.triton.experts import SortedRows
from kernels.triton.linear.fp4_operands import (
    TARGETS,
    bytes_of,
    multiples_of,
    pack_codes,
    weights_of,
)
from kernels.triton.linear.hopper.launch import Levels, launch_w4, many_rows_tile, takes
from kernels.triton.linear.launch import (
    Product,
    by_warps,
    fitting,
    launch_few_rows,
    rows_of_tile,
    store_tile,
    sum_tile,
)
from kernels.triton.linear.operands import as_warps_read
from kernels.triton.linear.packing import BLOCK, lay_bias
from kernels.triton.linear.weight import GpuWeight, check_inputs
from kernels.triton.tuning import Tile, shared_memory

GROUPS = (16, 32)
FLOATS = tuple(TARGETS)


@triton.jit(do_not_specialize=["M"])
def fp4_kernel(
    x, packed, scale, unit, bias, out, parts, arrivals, experts, pairs, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr, HALVES: tl.constexpr, WARP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows).

    With `experts` a tile of rows is one of an expert, and weights lie one after the other. REST is
    whether the last 128 inputs are not all there, HALVES 2 where 16 share a scale.
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
        scale += expert * (blocks * N * HALVES)
        unit += expert * N
        if BIAS:
            bias += expert * N
    real = own[None, :]
    words = (tile * (OUTPUTS // 64) + tl.arange(0, OUTPUTS // 64))[:, None] * 1024
    words = packed + words + tl.arange(0, 1024)[None, :]
    k = tl.arange(0, 128)[:, None]
    columns = x + row[None, :] * K + k  # x transposed
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        w = tl.load(words + g * (N * 16), eviction_policy="evict_first")
        if HALVES == 2:
            place = scale + g * (N * 2) + (n // 64 * 128 + n % 64)
            second = tl.load(place + 64)
        else:
            place = scale + g * N + n
            second = None
        first_scales = tl.load(place)
        there = real & (k < K - g * 128) if REST else real
        xt = tl.load(columns + g * 128, mask=there, other=0.0)
        xt = as_warps_read(xt) if WARP else xt
        acc = tl.dot(weights_of(w, first_scales, second, HALVES, DT, WARP), xt, acc)
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        acc *= tl.load(unit + n)[:, None]
        if BIAS:
            acc += tl.load(bias + n)[:, None]
        store_tile(acc, out, m, n, N, real)


@dataclass(frozen=True)
class Fp4Weight(GpuWeight):
    """A weight in NVFP4 or MXFP4, for float rows.

    Attributes:
        packed: int32 [ceil(K / 128), N / 64, 1024].
        scale: int32 [ceil(K / 128), N], or with two words an output [ceil(K / 128), N / 64, 2, 64].
        unit: fp32 [N], what the scales of an output are multiples of.
        bias: fp32 [N] or None.
        inputs: K.
        group: Inputs that share a scale: 16 or 32.
        dtype: Of the rows that it is packed for.
    """

    packed: Tensor
    scale: Tensor
    unit: Tensor
    bias: Tensor | None
    inputs: int
    group: int
    dtype: torch.dtype
    zero_points: bool = False

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernel."""
        return f"w4a16_{'nvfp4' if self.halves == 2 else 'mxfp4'}"

    @property
    def halves(self) -> int:
        """Scales of 32 inputs."""
        return 32 // self.group

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.unit.shape[-1], self.inputs

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 128

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are floats of K inputs."""
        check_inputs(x, (self.dtype,), self.inputs)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says, with stages that fit."""
        tile = super().few_rows_tile(x, sorted_rows)
        return fitting(tile, 64 + 4 * self.halves, 256, 0, shared_memory(x.device))

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut."""
        found = None
        whole = self.inputs % BLOCK == 0
        if sorted_rows is None and whole and takes(self, self._levels, dtype):
            found = many_rows_tile(self.family, x.device, len(x), *self.size)
        return found or self.plain_tile(x, dtype, sorted_rows)

    @property
    def _levels(self) -> Levels:
        return Levels(self.scale, self.halves, self.unit)

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel."""
        launch_few_rows(
            fp4_kernel, (product.x, self.packed, self.scale, self.unit), self.bias, product, tile,
            REST=self.inputs % BLOCK != 0, HALVES=self.halves, WARP=by_warps(tile),
        )  # fmt: skip

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows."""
        launch_w4(self, self._levels, product, tile)


def fits_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype, unit: Tensor | None = None) -> bool:
    """Whether the kernel takes a weight for rows of a type; arguments as of `pack_fp4`."""
    outputs, inputs = codes.shape[-2:]
    whole = outputs % 64 == 0 and inputs % 32 == 0 and dtype in FLOATS
    return whole and inputs / scale.shape[-1] in GROUPS and _as_bytes(codes, scale, unit)[2]


def codes_of_e4m3(elements: Tensor) -> Tensor:
    """The four bits of each element that is held as e4m3, of whose values e2m1 has some: uint8.

    Exponents of e4m3 are 6 larger; only 0.5 has a leading one there and none in e2m1.
    """
    bits = elements.contiguous().view(torch.uint8)
    magnitude = (bits & 0x7F) >> 2  # exponent and first bit of the mantissa
    half, one = 12, 14
    codes = (magnitude.clamp(min=one) - half) * (magnitude >= one) + (magnitude == half)
    return codes.to(torch.uint8) | (bits >> 4 & 8)


def pack_fp4(
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    unit: Tensor | None = None,
) -> Fp4Weight:
    """Lay a weight out, on the device it is on.

    Args:
        codes: uint8 [N, K], the four bits of each element: sign, exponent, mantissa; N a multiple
            of 64, K of 32; or of E weights alike, [E, N, K], all else likewise.
        scale: fp32 [N, K / 16] or [N, K / 32].
        bias: Float [N] or None.
        dtype: Of the rows that it will be multiplied by.
        unit: fp32 [N, 1], what scales are e4m3 multiples of; without it they are powers of two.

    Raises:
        ValueError: a shape or type is another, or scales are no such multiples or too far apart.
    """
    *_, inputs = codes.shape
    require(
        codes.dtype == torch.uint8 and fits_fp4(codes, scale, dtype, unit),
        f"codes are {codes.dtype} {tuple(codes.shape)}, scales {tuple(scale.shape)}, rows {dtype}; "
        "needed are uint8 [N, K], N in 64s, for fp16 or bf16, and [N, K / 16] or [N, K / 32], "
        "e4m3 multiples of the unit or powers of two, in an output at most 2^28 apart",
    )
    group, rest = inputs // scale.shape[-1], -inputs % BLOCK
    found, units, _ = _as_bytes(codes, scale, unit)
    found = F.pad(found, (0, rest // group)).unflatten(-1, (-1, 4, 32 // group))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    words = (found << shifts[:, None]).sum(-2, dtype=torch.int32)  # [N, K / 128, halves]
    laid = words[..., 0].mT
    if group == 16:
        laid = words.unflatten(-3, (-1, 64)).movedim((-4, -3, -2, -1), (-3, -1, -4, -2))
    packed = pack_codes(F.pad(codes, (0, rest)), dtype)
    return Fp4Weight(
        packed, laid.contiguous(), units.squeeze(-1).contiguous(), lay_bias(bias, codes), inputs,
        group, dtype,
    )  # fmt: skip


def _as_bytes(codes: Tensor, scale: Tensor, unit: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """The byte of each scale, what an output's are multiples of, and whether nothing is lost.

    A scale that has come from its e4m3 multiple by a division may differ from it in the last bits.
    """
    units = scale.amax(-1, keepdim=True) if unit is None else unit * 256
    exact = scale / units if unit is None else (scale / unit).to(torch.float8_e4m3fn).float() / 256
    found = bytes_of(exact)
    kept = torch.isclose(multiples_of(found) * units, scale, rtol=1e-6, atol=0.0)
    empty = (codes & 7).unflatten(-1, (scale.shape[-1], -1)).amax(-1) == 0
    return found, units, bool((kept | empty).all())
