"""W16A16: fp16 or bf16 weights and activations, few rows.

    y[m, n] = sum_k x[m, k] w[n, k] + b[n],    sums in fp32

The weight stays [N, K], where cuBLAS, which takes calls of many rows, reads it too. Its bytes are
all that counts: a program reads tiles of 64 outputs by 256 or 512 bytes, by TMA where there is one,
as many at a time as shared memory holds. The weight is the left operand (wgmma wants 64 rows there,
x has fewer), so that the tile of the sum is transposed.

Tiles need not divide a weight: what is beyond its last output and input is read as zeros, or the
last output again, and not stored.

Small products, such as a router's, are bound by latency, not by bytes. They run as matrix-vector
products, a program for each output and row, which loads its weights before it waits for its input:
on an H200 the router of gpt-oss-20b takes 1.5 us for a token, by tiles 4.5.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.common import (
    AHEAD,
    Workspace,
    capability,
    overlap,
    prefetch_lines,
    require,
    takes_wide_steps,
    wait_and_announce,
)
from kernels.triton.experts import SortedRows
from kernels.triton.linear.launch import (
    Product,
    launch_few_rows,
    rows_of_tile,
    store_tile,
    sum_tile,
    tile_for,
)
from kernels.triton.linear.packing import BLOCK
from kernels.triton.linear.weight import GpuWeight, check_inputs
from kernels.triton.tuning import Tile

MANY_OUTPUTS = 16384  # of as many, cuBLAS is slower up to 64 rows; of fewer up to 16
FLOATS = (torch.float16, torch.bfloat16)
GEMV = Tile(1, 1, stages=1)  # a matrix-vector product; it takes less time than others up to
MOST_SUMS, MOST_INPUTS = 3072, 8192  # outputs times rows, and inputs, and for several rows up to
MOST_PRODUCTS = 1 << 23  # multiplications, as each row reads the weight
ALIGNED = 8  # inputs in the 16 bytes of which a row has a whole number


@triton.jit(do_not_specialize=["M"])
def w16a16_kernel(
    x, weight, columns, tiles, bias, out, parts, arrivals, experts, pairs, M, N, K,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, SHARE: tl.constexpr, READY: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, split, tile of rows); REST is whether BLOCK does not divide K.

    `columns` and `tiles` are TMA descriptors of x and weight, or None: then loads are by pointers.
    Rows of an expert lie anywhere in x, and have no descriptor.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(K, BLOCK)
    share = tl.cdiv(blocks, SPLITS)
    first = split * share
    k, n = tl.arange(0, BLOCK), tile * OUTPUTS + tl.arange(0, OUTPUTS)
    held = tl.minimum(n, N - 1)
    expert, m, row, there = rows_of_tile(
        row_tile, M, experts, pairs, SHARE, ROWS, READY, WIDE, OVERLAP
    )
    above = tile * OUTPUTS  # rows of the weights
    if experts is not None:
        if expert < 0:
            return
        above += expert * N
        weight += expert.to(tl.int64) * N * K
        if BIAS:
            bias += expert * N
    real = there[None, :]
    rows_of_weight = weight + held.to(tl.int64)[:, None] * K
    if OVERLAP:
        line = tl.arange(0, BLOCK // 64) * 64
        for i in tl.static_range(AHEAD):
            if first + i < blocks:
                lines = tl.minimum((first + i) * BLOCK + line, K - 1)
                prefetch_lines(rows_of_weight + lines[None, :])
    wait_and_announce(OVERLAP)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for g in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        if tiles is not None:
            w = tiles.load([above, g * BLOCK])
        elif REST:
            place = rows_of_weight + g * BLOCK + k[None, :]
            inside = k[None, :] < K - g * BLOCK
            w = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(rows_of_weight + g * BLOCK + k[None, :], eviction_policy="evict_first")
        if columns is not None:
            xt = columns.load([row_tile * ROWS, g * BLOCK]).T
        else:
            read = real & (k[:, None] < K - g * BLOCK) if REST else real
            xt = tl.load(x + row[None, :] * K + g * BLOCK + k[:, None], mask=read, other=0.0)
        acc = tl.dot(w, xt, acc)
    last = True
    if SPLITS > 1:
        acc, last = sum_tile(acc, parts, arrivals, tile, split, row_tile, real, SPLITS)
    if last:
        if BIAS:
            acc += tl.load(bias + held)[:, None].to(tl.float32)
        store_tile(acc, out, m, n, N, real & (n < N)[:, None])


@triton.jit
def gemv_kernel(
    x, weight, bias, out, N, K, BLOCK: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Program (output, row); BLOCK is K or more."""
    n, m, k = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    w = tl.load(weight + n * K + k, mask=k < K, other=0.0).to(tl.float32)
    wait_and_announce(OVERLAP)
    y = tl.sum(w * tl.load(x + m * K + k, mask=k < K, other=0.0), 0)
    if BIAS:
        y += tl.load(bias + n)
    tl.store(out + m * N + n, y.to(out.dtype.element_ty))


def fits(weight: Tensor) -> bool:
    """Whether a weight is of a type that the kernel takes, in rows that the TMA unit reads."""
    return weight.dtype in FLOATS and weight.is_contiguous() and weight.shape[1] % ALIGNED == 0


@dataclass(frozen=True)
class DenseWeight(GpuWeight):
    """A weight [N, K] in the model's float type, with its bias [N] or None.

    Quantized rows are dequantized: what no kernel of quantized weights takes is held so.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def family(self) -> str:
        """Under which the tables of tiles know the kernel."""
        return "w16a16"

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        outputs, inputs = self.weight.shape
        return outputs, inputs

    @property
    def gathers(self) -> bool:
        """Whether `rows` gives rows of it."""
        return True

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight: [T, K] in `dtype` of ids int64 [T]."""
        return self.weight[ids].to(dtype)

    @property
    def takes_sorted_rows(self) -> bool:
        """Whether the kernel takes it."""
        return fits(self.weight)

    def run(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        workspace: Workspace,
        dtype: torch.dtype = torch.bfloat16,
        sorted_rows: SortedRows | None = None,
        tile: Tile | None = None,
    ) -> Tensor:
        """x W^T + bias; see `GpuWeight.run`."""
        if x_scale is not None:
            if x_scale.numel() > len(x):  # a scale for each run of 128 inputs
                x_scale = x_scale.repeat_interleave(128, dim=1)[:, : x.shape[1]]
            x = (x.float() * x_scale).to(self.weight.dtype)
        return super().run(x, None, workspace, dtype, sorted_rows, tile)

    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Nothing here: cuBLAS takes any size."""

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """None for cuBLAS, which takes many rows, and weights that the kernel does not."""
        if sorted_rows is None and not self._few(x):
            return None
        (outputs, inputs), rows = self.size, len(x)
        small = rows * outputs <= MOST_SUMS and inputs <= MOST_INPUTS
        small = small and (rows == 1 or rows * outputs * inputs <= MOST_PRODUCTS)
        return GEMV if small and sorted_rows is None else self.few_rows_tile(x, sorted_rows)

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """As the table or the rule says, with stages that fit."""
        outputs, inputs = self.size
        filled = outputs + -outputs % 64, inputs + -inputs % BLOCK
        tile = tile_for(self.family, x, *filled, sorted_rows)
        if takes_wide_steps(x.device):
            return tile
        return replace(tile, stages=min(tile.stages, 4), inputs=BLOCK)

    def _few(self, x: Tensor) -> bool:
        """Whether the kernel is ahead of cuBLAS."""
        return (
            x.is_cuda
            and 0 < x.shape[0] <= (64 if self.weight.shape[0] >= MANY_OUTPUTS else 16)
            and x.dtype == self.weight.dtype
            and x.is_contiguous()
            and fits(self.weight)
        )

    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel; its operands are described for the TMA unit where there is one."""
        x, weight, sorted_rows = product.x, self.weight, product.sorted_rows
        outputs, inputs = weight.shape
        require(
            fits(weight),
            f"weight is {weight.dtype} {tuple(weight.shape)}; needed is contiguous float16 or "
            f"bfloat16 [N, K], K in {ALIGNED}s",
        )
        check_inputs(x, (weight.dtype,), inputs)
        if tile == GEMV and sorted_rows is None:
            gemv_kernel[(outputs, len(x))](
                x, weight, self.bias, product.out, outputs, inputs,
                BLOCK=triton.next_power_of_2(inputs), BIAS=self.bias is not None, **overlap(),
            )  # fmt: skip
            return
        columns = tiles = None
        if capability() >= 90:
            if sorted_rows is None:
                columns = TensorDescriptor.from_tensor(x, [tile.rows, tile.inputs])
            lines = outputs * (1 if sorted_rows is None else sorted_rows.total)
            block = [tile.outputs, tile.inputs]
            tiles = TensorDescriptor(weight, [lines, inputs], [inputs, 1], block)
        operands = (x, weight, columns, tiles)
        launch_few_rows(
            w16a16_kernel, operands, self.bias, product, tile, padding=-outputs % tile.outputs,
            BLOCK=tile.inputs, REST=inputs % tile.inputs != 0,
        )  # fmt: skip

    def by_library(self, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same by cuBLAS."""
        w = self.weight
        if dtype == w.dtype or not x.is_cuda:
            return F.linear(x, w, self.bias).to(dtype)
        out = torch.mm(x, w.t(), out_dtype=dtype)  # logits: not rounded to the model's type
        return out if self.bias is None else out + self.bias
