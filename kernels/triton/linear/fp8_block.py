"""fp8 in blocks: e4m3 weights with a scale a block of 128 x 128, e4m3 rows with one a run of 128.

    y[m, n] = sum_g sx[m, g] sw[n / 128, g] (sum_{k in g} xq[m, k] wq[n, k]) + b[n]

g counts runs of 128 inputs. This is the arithmetic of DeepSeek-V3 (arXiv 2412.19437, section 3.3):
the sum of a run stays in the tensor cores, which keep about 14 bits, and is scaled into an fp32 sum
outside of them.

Weights stay [N, K], as cuBLASLt wants them; it takes calls of many rows on Hopper, where nothing
that Triton makes of two sums in registers comes near it. All else is one kernel, with the weight as
the left operand (see `kernels.triton.linear.w8a8`): a step loads two runs, since longer stretches
of a row of W are read faster. Devices before Ada have no e4m3 products: there both operands become
fp16 in registers, less a factor of 256 each, which is exact.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    AHEAD,
    ASM,
    capability,
    library_scales,
    prefetch_lines,
    require,
    storage,
    takes_wide_steps,
    wait_and_announce,
)
from kernels.triton.experts import SortedRows
from kernels.triton.linear.launch import Product, launch_few_rows, rows_of_tile, sum_tile, tile_for
from kernels.triton.linear.packing import lay_bias
from kernels.triton.linear.weight import GpuWeight
from kernels.triton.tuning import Tile

RUN = 128
LIBRARY_ROWS = 64  # beyond these cuBLASLt is ahead
LIBRARY_TYPES = (torch.bfloat16, torch.float16)
BAND = 8  # row tiles that are taken together, so that their weights are read once

# Two words of two fp16 from four e4m3: s eeee mmm becomes s 0eeee mmm0000000, the 256th.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b32 a, b, s;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 1;
and.b32 s, s, 0x3F803F80;
lop3.b32 $0, a, 0x80008000, s, 0xEA;
shr.u32 s, b, 1;
and.b32 s, s, 0x3F803F80;
lop3.b32 $1, b, 0x80008000, s, 0xEA; }""")


@triton.jit
def operand(x, NATIVE: tl.constexpr):
    """e4m3 as it is; or its bits in int8 to fp16, the 256th of their value."""
    if NATIVE:
        y = x
    elif ASM:
        y = tl.inline_asm_elementwise(
            E4M3_TO_FP16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = x.to(tl.int16)
        y = (((wide & 0x7F) << 7) | (wide & -32768)).to(tl.float16, bitcast=True)
    return y


@triton.jit
def prefetch_runs(rows, i, width, first, RUNS: tl.constexpr):
    """Ask for the first steps of a tile's weights, its rows i of `width` from a pointer on."""
    for ahead in tl.static_range(AHEAD * RUNS):
        if first + ahead < width // 128:
            prefetch_lines(rows + (first + ahead) * 128 + i * width)


@triton.jit
def store_some(y, out, output, row, i, j, n, m, N, real, SORTED: tl.constexpr):
    """Results of outputs n = output + i that exist, of rows row + j, or if SORTED m, to memory."""
    place = out + row.to(tl.int64) * N + output + (j[None, :] * N + i[:, None])
    if SORTED:
        place = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(place, y.to(out.dtype.element_ty), mask=real & (n < N)[:, None])


@triton.jit(do_not_specialize=["M", "run_step"])
def fp8_block_kernel(
    x, packed, x_scale, w_scale, bias, out, parts, arrivals, experts, pairs, M, N, K,
    width, row_step, run_step, blocks,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    RUNS: tl.constexpr, BAND: tl.constexpr, NATIVE: tl.constexpr, RAGGED: tl.constexpr,
    BIAS: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); RUNS runs a step, RAGGED: K is not whole."""
    row_tile, tile = tl.swizzle2d(
        tl.program_id(2), tl.program_id(0), tl.num_programs(2), tl.num_programs(0), BAND
    )
    split, steps = tl.program_id(1), width // (128 * RUNS)
    share = tl.cdiv(steps, SPLITS)
    first = split * share
    k = tl.arange(0, 128)
    output, row = tile * OUTPUTS, row_tile * ROWS
    i, j = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)  # offsets within a tile fit in 32 bits
    n = output + i
    expert, m, token, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (tl.num_programs(0) * OUTPUTS * width)
        w_scale += expert * (tl.cdiv(N, 128) * blocks)
        if BIAS:
            bias += expert * N
    real = there[None, :]
    weights = packed + output.to(tl.int64) * width + (i[:, None] * width + k[None, :])
    columns = x + row.to(tl.int64) * K + (j[None, :] * K + k[:, None])  # [128, ROWS], x transposed
    if experts is not None:
        columns = x + token.to(tl.int64)[None, :] * K + k[:, None]
    one: tl.constexpr = OUTPUTS <= 128  # block of the weight: its scale is put to those of rows
    of_outputs = w_scale + (output if one else n) // 128 * blocks
    of_rows = x_scale + token * row_step
    if OVERLAP:
        prefetch_runs(packed + output.to(tl.int64) * width, i, width, first * RUNS, RUNS)
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(first, tl.minimum(first + share, steps), num_stages=STAGES):
        for run in tl.static_range(RUNS):
            g = step * RUNS + run
            w = tl.load(weights + g * 128, eviction_policy="evict_first")
            there_too = real & (g * 128 + k < K)[:, None] if RAGGED else real
            xt = tl.load(columns + g * 128, mask=there_too, other=0.0)
            sw = tl.load(of_outputs + g)
            sx = tl.load(of_rows + g * run_step, mask=there, other=0.0)
            part = tl.dot(operand(w, NATIVE), operand(xt, NATIVE), out_dtype=tl.float32)
            acc += part * ((sw * sx)[None, :] if one else sw[:, None] * sx[None, :])
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        y = acc if NATIVE else acc * 65536.0
        if BIAS:
            y += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
        store_some(y, out, output, row, i, j, n, m, N, real, experts is not None)


@dataclass(frozen=True)
class Fp8BlockWeight(GpuWeight):
    """An e4m3 weight with a scale a block, for e4m3 rows with one a run.

    Attributes:
        packed: e4m3 [N', K'], zeros appended up to 64s of outputs and 128s of inputs.
        scale: fp32 [N' / 128, K' / 128], both rounded up, rows padded to fours.
        bias: fp32 [N] or None.
        outputs: N.
        inputs: K.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernel."""
        return "fp8_block"

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.outputs, self.inputs

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are e4m3 of K inputs with a scale a run, of any strides.

        The strides of scales that `quantize_rows` gives are the fastest.
        """
        require(
            x.dtype == torch.float8_e4m3fn and x.is_contiguous(),
            f"x is {x.dtype}; needed is contiguous float8_e4m3fn",
        )
        require(x.shape[1] == self.inputs, f"x has {x.shape[1]} inputs, the weight {self.inputs}")
        needed = (len(x), self.packed.shape[1] // RUN)
        found = (torch.Size(), None) if x_scale is None else (x_scale.shape, x_scale.dtype)
        require(
            found == (needed, torch.float32),
            f"scales of x are {found[1]} {tuple(found[0])}; needed is one for each run of 128, "
            f"fp32 {needed}",
        )

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut; None for cuBLASLt."""
        if sorted_rows is None and len(x) > LIBRARY_ROWS and self._library_takes(dtype):
            return None
        return self.few_rows_tile(x, sorted_rows)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says."""
        return tile_for(self.family, x, *self.packed.shape, sorted_rows)

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel."""
        x, x_scale, (lines, width) = product.x, product.x_scale, self.packed.shape
        assert x_scale is not None
        small = tile.outputs <= 128 and tile.outputs * tile.rows <= 64 * 64
        wide = small and width % (2 * RUN) == 0 and takes_wide_steps(x.device)
        operands = (storage(x), storage(self.packed), x_scale, self.scale)
        launch_few_rows(
            fp8_block_kernel, operands, self.bias, product, tile, padding=lines - self.outputs,
            width=width, row_step=x_scale.stride(0), run_step=x_scale.stride(1),
            blocks=self.scale.shape[1], RUNS=2 if wide else 1, BAND=BAND,
            NATIVE=capability() >= 89, RAGGED=self.inputs != width,
        )  # fmt: skip

    def _library_takes(self, dtype: torch.dtype) -> bool:
        whole = self.outputs % RUN == 0 and self.inputs % RUN == 0
        return whole and dtype in LIBRARY_TYPES and library_scales(self.packed.device)

    def by_library(self, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same by cuBLASLt, on Hopper alone; N and K are multiples of 128.

        It wants the scales of x by run, 16 bytes of a run at a time: rows are padded to fours, by
        what is in memory, since no row sees another.
        """
        assert x_scale is not None
        rows, whole = x.shape[0], x.shape[0] + -x.shape[0] % 4
        if whole != rows:
            padded = torch.empty((whole, x.shape[1]), dtype=x.dtype, device=x.device)
            padded[:rows].copy_(x)
            x = padded
        if whole != rows or x_scale.stride() != (1, rows):
            by_run = torch.empty((x_scale.shape[1], whole), device=x.device)
            by_run[:, :rows].copy_(x_scale.t())
            x_scale = by_run.t()
        out = F.scaled_mm(
            x,
            self.packed.t(),
            x_scale,
            F.ScalingType.BlockWise1x128,
            self.scale.t(),
            F.ScalingType.BlockWise128x128,
            swizzle_a=F.SwizzleType.NO_SWIZZLE,
            swizzle_b=F.SwizzleType.NO_SWIZZLE,
            output_dtype=dtype,
        )[:rows]
        return out if self.bias is None else out.add_(self.bias)


def pack_fp8_block(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Fp8BlockWeight:
    """Lay a quantized weight out on the device it is on.

    Args:
        q: e4m3 [N, K], K a multiple of 16.
        scale: fp32 [ceil(N / 128), ceil(K / 128)].
        bias: Float [N] or None.

    Raises:
        ValueError: a shape or type is another.
    """
    require(
        q.dim() >= 2 and q.dtype == torch.float8_e4m3fn and q.shape[-1] % 16 == 0,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is float8_e4m3fn [N, K], K in 16s",
    )
    *experts, outputs, inputs = q.shape
    blocks = (*experts, -(-outputs // RUN), -(-inputs // RUN))
    require(
        tuple(scale.shape) == blocks,
        f"scales are {tuple(scale.shape)}; needed is one for each block of 128 x 128, {blocks}",
    )
    bias = lay_bias(bias, q)
    q = F.pad(q.view(torch.int8), (0, -inputs % RUN, 0, -outputs % 64)).view(q.dtype)
    scale = F.pad(scale.detach().float(), (0, -scale.shape[-1] % 4))
    return Fp8BlockWeight(q.contiguous(), scale.contiguous(), bias, outputs, inputs)
