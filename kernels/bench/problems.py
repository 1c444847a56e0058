"""The shapes that tuning and benchmarks run: arguments on a GPU, rotated past its cache, checked.

Weights and caches exist in so many copies that none is still in L2 when its turn comes; every
call's result is compared with its fp64 twin before it is timed (`kernels.bench.timing`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.shapes import Gemm, Shape
from kernels.bench.timing import copies_of, relative, timed
from kernels.triton.common import Workspace
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.dispatch import DenseWeight, linear
from kernels.triton.linear.fp8_block import fp8_block_linear, pack_fp8_block
from kernels.triton.linear.w4_many import w4a8_linear, w4a16_linear
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w4a16 import pack_w4a16
from kernels.triton.linear.w8a8 import pack_w8a8, w8a8_linear
from kernels.triton.linear.w8a16 import pack_w8a16, w8a16_linear
from kernels.triton.linear.w16a16 import w16a16_linear
from kernels.triton.tuning import Tile
from kernels.two_level import LARGEST

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem:
    """One call to measure.

    Attributes:
        name: Of the family and shape.
        nbytes: Read and written by one call, at least.
        copies: Sets of arguments.
        call: call(i, cut) with the i-th set; `cut` a tile, or None for the device's table.
        error: error(result): distance from the twin, relative, of the result of call(0, ...).
        tolerance: The largest error of a right result.
        operations: Sums and products of 16 bits, where they may be the limit; of 8 bits half.
        shape: What is computed, for peers that compute the same.
    """

    name: str
    nbytes: int
    copies: int
    call: Callable[[int, Any], Tensor]
    error: Callable[[Tensor], float]
    tolerance: float
    operations: float = 0.0
    shape: Shape | None = None

    def check(self, cut: Any = None) -> float:
        """The error of one call; raises ValueError where it is too large or NaN."""
        found = self.error(self.call(0, cut))
        if not found < self.tolerance:
            raise ValueError(f"{self.name} with {cut}: error {found}, allowed is {self.tolerance}")
        return found

    def time(self, cut: Any = None) -> float:
        """Microseconds of one call."""
        return timed(lambda i: self.call(i, cut), self.copies)


def gemm(
    family: str, rows: int, outputs: int, inputs: int, workspace: Workspace,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:  # fmt: skip
    """A linear layer of a family: w4a16, w4a8 or w8a16 and a variant, w8a8, fp8, fp8_block, w16a16.

    Results are in `dtype`. Of 4 bits groups are 128 inputs long, of 8 bits all, but in a variant;
    w4a8_two_level has scales of two levels.
    """
    group = 64 if family.endswith("_g64") else 128 if family.startswith("w4") else inputs
    bits = (4 if family.startswith("w4") else 8) + (8 if "two_level" in family else 32) / group
    if family == "w16a16":
        bits = 16
    nbytes = int(outputs * inputs * bits / 8)
    copies = copies_of(nbytes)
    shape = (rows, outputs, inputs)
    if family in ("w8a8", "fp8"):
        call, wanted = _w8a8(family, *shape, copies, workspace, dtype)
    elif family == "w16a16":
        call, wanted = _w16a16(*shape, copies, workspace, dtype)
    elif family == "fp8_block":
        call, wanted = _fp8_block(*shape, copies, workspace, dtype)
    else:
        call, wanted = _grouped(family, *shape, group, copies, workspace, dtype)
    wide = 2 if "a16" in family else 1  # bytes of an input
    nbytes += rows * (inputs * wide + outputs * 2)
    tolerance = 1e-2 if family.startswith("fp8") else 1e-3 if dtype == torch.float16 else 4e-3
    return Problem(
        f"{family} {outputs}x{inputs} M={rows} {str(dtype)[6:]}", nbytes, copies, call,
        lambda y: relative(y, wanted), tolerance, rows * outputs * inputs * wide,
        Gemm(family, *shape, group, dtype),
    )  # fmt: skip


def grouped_weight(
    bits: int, outputs: int, inputs: int, group: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random integers, scales of groups, and zero points or None."""
    top = 1 << (bits - 1)

    def random(width: int) -> Tensor:
        return torch.randint(-top, top, (outputs, width), dtype=torch.int8, device="cuda")

    scale = torch.rand(outputs, inputs // group, device="cuda") * 0.01 + 0.002
    return random(inputs), scale, random(inputs // group) if zeros else None


def two_level_scale(outputs: int, groups: int) -> Tensor:
    """Random scales [outputs, groups] of two levels; the first two multiples are coprime."""
    multiple = torch.randint(1, LARGEST + 1, (outputs, groups), device="cuda").float()
    multiple[:, :1], multiple[:, 1:2] = LARGEST - 1, LARGEST
    unit = torch.randint(8, 16, (outputs, 1), device="cuda") * 2.0**-14
    return unit * multiple


def _grouped(family, rows, outputs, inputs, group, copies, workspace, dtype):
    bits, zeros = int(family[1]), family.endswith("_zeros")
    sets = [grouped_weight(bits, outputs, inputs, group, zeros) for _ in range(copies)]
    if "two_level" in family:
        sets = [(q, two_level_scale(*scale.shape), zero) for q, scale, zero in sets]
    pack = {"w4a16": pack_w4a16, "w4a8": pack_w4a8, "w8a16": pack_w8a16}[family.split("_")[0]]
    weights = [pack(q, scale, None, zero) for q, scale, zero in sets]
    q, scale, zero = sets[0]
    if family.startswith("w4a8"):
        x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, device="cuda")
        own = torch.rand(rows, 1, device="cuda") * 0.01
        wanted = twins.grouped_linear(x, q, scale, None, own, zero)
        return lambda i, tile: w4a8_linear(x, own, weights[i], workspace, dtype, tile), wanted
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    call = w4a16_linear if bits == 4 else w8a16_linear
    wanted = twins.grouped_linear(x, q, scale, None, None, zero)
    return lambda i, tile: call(x, weights[i], workspace, tile), wanted


def _w8a8(family, rows, outputs, inputs, copies, workspace, dtype):
    def random(*shape: int) -> Tensor:
        if family == "fp8":
            return torch.randn(shape, device="cuda").to(FP8)
        return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")

    sets = [random(outputs, inputs) for _ in range(copies)]
    scale = torch.rand(outputs, device="cuda") * 0.01 + 0.002
    weights = [pack_w8a8(q, scale) for q in sets]
    x, own = random(rows, inputs), torch.rand(rows, 1, device="cuda") * 0.01
    wanted = twins.scaled_linear(x, own, sets[0], scale)
    return lambda i, tile: w8a8_linear(x, own, weights[i], workspace, dtype, tile), wanted


def _w16a16(rows, outputs, inputs, copies, workspace, dtype):
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=dtype) for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    wanted = twins.float_linear(x, weights[0])
    held = [DenseWeight(w, None) for w in weights]

    def call(i: int, tile: Tile | None) -> Tensor:
        if tile is None:  # what a model runs: cuBLAS, beyond few rows
            return linear(x, None, held[i], workspace, dtype)
        return w16a16_linear(x, weights[i], None, workspace, dtype, tile)

    return call, wanted


def _fp8_block(rows, outputs, inputs, copies, workspace, dtype):
    runs, tiles = -(-inputs // 128), -(-outputs // 128)
    sets = [torch.randn(outputs, inputs, device="cuda").to(FP8) for _ in range(copies)]
    scale = torch.rand(tiles, runs, device="cuda") * 0.01 + 0.002
    weights = [pack_fp8_block(q, scale) for q in sets]
    x, own = quantize_rows(torch.randn(rows, inputs, device="cuda"), None, FP8, 128)
    wanted = twins.fp8_block_linear(x, own, sets[0], scale)
    return lambda i, tile: fp8_block_linear(x, own, weights[i], workspace, dtype, tile), wanted
