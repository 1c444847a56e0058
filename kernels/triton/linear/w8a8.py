"""W8A8: int8 or fp8 weights and activations, one scale an output channel, one a row or tensor.

    y[m, n] = (sum_k xq[m, k] wq[n, k]) (sx[m] sw[n]) + b[n]

int8 sums are exact in int32 and the epilogue is unfused fp32, so that a result equals
`kernels.reference.int8_linear` bit for bit, however it is cut. Asked for int32 the kernels give the
sums as they are: parts of a sum over several GPUs. fp8 (e4m3) sums leave the tensor
cores, which keep about 14 bits, for fp32 every 128 inputs; many rows' every `SEGMENT` runs of 128,
where there are more than `FAST_INPUTS`.

int8 weights lie [K / 128, N, 128]: at one step of the sum all programs read one contiguous stretch,
and the same array is a matrix of K / 128 * N rows for the TMA unit. fp8 weights stay [N, K], since
cuBLASLt, which takes calls of most rows, wants them so, and longer stretches of a row are read at a
step.

Two kernels. Up to some tens of rows, and on other devices than sm_90 always, the weight is the left
operand (wgmma wants 64 rows there, x has fewer), the sum is split where outputs are few. Beyond,
that of `kernels.triton.linear.hopper.w8`, one program an SM. Of fp8 more than `LIBRARY_ROWS` rows
go to cuBLASLt: 4096 took it 720 us on an H100 for 28672x4096, and the kernel 790.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import (
    AHEAD,
    is_sm_90,
    library_scales,
    prefetch,
    prefetch_lines,
    require,
    takes_wide_steps,
    wait_and_announce,
)
from kernels.triton.experts import SortedRows
from kernels.triton.linear.hopper.launch import FAST_INPUTS, launch_w8, many_rows_rule
from kernels.triton.linear.launch import (
    COUNTED,
    Product,
    launch_few_rows,
    rows_of_tile,
    store_tile,
    sum_tile,
)
from kernels.triton.linear.packing import BLOCK, fits_tiles, gather_rows, lay_bias
from kernels.triton.linear.weight import GpuWeight, check_input_scale, check_inputs
from kernels.triton.tuning import Tile, measured_tile, multiprocessors, rule

FAMILY = {torch.int8: "w8a8", torch.float8_e4m3fn: "fp8"}
LIBRARY_ROWS = 256  # of fp8: beyond these cuBLASLt is ahead on sm_90


@triton.jit(do_not_specialize=["M"])
def w8a8_kernel(
    x, packed, x_scale, w_scale, width, bias, out, parts, arrivals, experts, pairs, M, N, K, step,
    pitch,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    PER_ROW: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, OVERLAP: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); the tile is transposed.

    If SHORT, rows of x have `width` < K inputs, and zeros stand for the others.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = tl.cdiv(K // BLOCK, SPLITS)
    first = split * share
    k = tl.arange(0, BLOCK)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    expert, m, row, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    if experts is not None:
        if expert < 0:
            return
        packed += expert.to(tl.int64) * (K * N)
        w_scale += expert * N
        if BIAS:
            bias += expert * N
    real = there[None, :]
    if WIDE:
        step, pitch = step.to(tl.int64), pitch.to(tl.int64)
    weights = packed + n[:, None] * pitch + k[None, :]
    columns = x + row[None, :] * width + k[:, None]
    if OVERLAP:
        for i in tl.static_range(AHEAD):
            if first + i < K // BLOCK:
                if packed.dtype.element_ty == tl.int8:  # a tile is one stretch
                    start = packed + (first + i) * step + tile * (OUTPUTS * BLOCK)
                    prefetch(start, OUTPUTS * BLOCK)
                else:
                    line = tl.arange(0, BLOCK // 128) * 128
                    prefetch_lines(packed + (first + i) * step + n[:, None] * pitch + line[None, :])
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], SUM)
    for g in tl.range(first, tl.minimum(first + share, K // BLOCK), num_stages=STAGES):
        w = tl.load(weights + g * step, eviction_policy="evict_first")
        inside = real & (k[:, None] < width - g * BLOCK) if SHORT else real
        xt = tl.load(columns + g * BLOCK, mask=inside, other=0.0)
        acc = tl.dot(w, xt, acc, out_dtype=SUM, max_num_imprecise_acc=128)
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        y = acc
        if out.dtype.element_ty != tl.int32:
            sx = tl.load(x_scale + row * PER_ROW, mask=there, other=0.0)
            y = acc.to(tl.float32) * (sx[None, :] * tl.load(w_scale + n)[:, None])
            if BIAS:
                y += tl.load(bias + n)[:, None]
        store_tile(y, out, m, n, N, real)


@dataclass(frozen=True)
class W8A8Weight(GpuWeight):
    """A weight of 8 bits for rows of its type.

    Attributes:
        packed: int8 [K / 128, N, 128] or e4m3 [N, K], contiguous, as copies of a weight keep it.
        scale: fp32 [N].
        bias: fp32 [N] or None.
    """

    SHORT_ROWS: ClassVar[bool] = True

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernels."""
        return FAMILY[self.packed.dtype]

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        outputs = len(self.scale)
        return outputs, self.packed.numel() // outputs

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 128 if self.packed.dtype == torch.int8 else 64

    @property
    def gathers(self) -> bool:
        """Whether `rows` gives rows of it."""
        return True

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T]."""
        layout = "runs" if self.packed.dtype == torch.int8 else "rows"
        return gather_rows(ids, self.packed, self.scale, self.size, dtype, layout)

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows are of the weight's type and have their scales."""
        check_inputs(x, (self.packed.dtype,), self.size[1], short=True)
        check_input_scale(x_scale, len(x))

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut; None for cuBLASLt."""
        if sorted_rows is not None:
            return self.few_rows_tile(x, sorted_rows)
        return tile_of(self.family, x.device, len(x), *self.size, dtype)

    @property
    def exact(self) -> bool:
        """Whether it is of int8."""
        return self.family == "w8a8"

    @property
    def output_scale(self) -> Tensor:
        """fp32 [N]."""
        return self.scale

    def plain_tile(
        self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None
    ) -> Tile | None:
        """The same if there were no kernel for many rows."""
        library = self.family == "fp8" and len(x) > 64 and _library_gives(dtype, x.device)
        return None if library and sorted_rows is None else self.few_rows_tile(x, sorted_rows)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """By rule."""
        if sorted_rows is None:
            return _few_rows(self.family, x.device, len(x), *self.size)
        row_tiles = len(sorted_rows.experts)
        return _few_rows(self.family, x.device, sorted_rows.rows, *self.size, row_tiles)

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel for few rows."""
        x, (outputs, inputs) = product.x, self.size
        integers = x.dtype == torch.int8
        require(self.packed.is_contiguous(), "the packed weight is not contiguous")
        block = BLOCK if integers or inputs % tile.inputs else tile.inputs
        step, pitch = (outputs * BLOCK, BLOCK) if integers else (block, inputs)
        launch_few_rows(
            w8a8_kernel, (x, self.packed, product.x_scale, self.scale, x.shape[1]), self.bias,
            product, tile, exact=integers, fused=False, wide=outputs * inputs > COUNTED,
            inputs=inputs, SHORT=x.shape[1] < inputs, step=step, pitch=pitch, BLOCK=block,
            PER_ROW=product.per_row, SUM=tl.int32 if integers else tl.float32,
        )  # fmt: skip

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows."""
        launch_w8(self.packed, self.scale, self.bias, product, tile)

    def by_library(self, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """fp8 by cuBLASLt; the scale of a tensor is spread over the rows."""
        assert x_scale is not None
        out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x,
            self.packed[:, : x.shape[1]].t(),
            scale_a=x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous(),
            scale_b=self.scale.reshape(1, -1),
            out_dtype=dtype,
            use_fast_accum=x.shape[1] <= FAST_INPUTS,
        )
        return out if self.bias is None else out.add_(self.bias)


@cache
def tile_of(
    family: str,
    device: torch.device,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tile | None:
    """Measured, else by rule: that of many rows on sm_90, where outputs fit. None: cuBLASLt's."""
    library = family == "fp8" and _library_gives(dtype, device)
    if library and rows > LIBRARY_ROWS:
        return None
    found = measured_tile(family, device, rows, outputs, inputs)
    if found is None and is_sm_90(device):
        long = family == "fp8" and inputs > FAST_INPUTS
        found = many_rows_rule(multiprocessors(device), rows, outputs, long)
    if found or (library and rows > 64):
        return found
    return _few_rows(family, device, rows, outputs, inputs)


def _few_rows(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int, row_tiles: int = 1
) -> Tile:
    """By rule; fp8 takes steps of 256 inputs where they fit, whole lines of its rows in memory."""
    own = rule(family, multiprocessors(device), rows, outputs, inputs, row_tiles)
    wide = family == "fp8" and inputs % 256 == 0 and takes_wide_steps(device)
    return replace(own, inputs=2 * BLOCK if wide else BLOCK)


def _library_gives(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies fp8 to this type: where cuBLASLt cannot, it has kernels for bf16."""
    return device.type == "cuda" and (dtype == torch.bfloat16 or library_scales(device))


def pack_w8a8(q: Tensor, scale: Tensor, bias: Tensor | None = None) -> W8A8Weight:
    """Lay a quantized weight out on the device it is on.

    Args:
        q: int8 or e4m3, [N, K]; N a multiple of 64, K of 128.
        scale: fp32 [N] or [N, 1].
        bias: Float [N] or None.

    Raises:
        ValueError: a shape or type is another.
    """
    require(
        fits_tiles(q) and q.dtype in FAMILY,
        f"weight is {q.dtype} {tuple(q.shape)}; needed is int8 or float8_e4m3fn [N, K], N in 64s "
        f"and K in {BLOCK}s",
    )
    of_rows = q.shape[:-1]
    outputs = of_rows.numel()
    require(scale.numel() == outputs, f"{scale.numel()} scales for {outputs} outputs")
    packed = q.contiguous()
    if q.dtype == torch.int8:
        packed = packed.view(*of_rows, -1, BLOCK).transpose(-3, -2).contiguous()
    flat = scale.detach().float().reshape(of_rows).contiguous()
    return W8A8Weight(packed, flat, lay_bias(bias, q))
