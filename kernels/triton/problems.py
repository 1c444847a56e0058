"""The shapes that tuning and benchmarks run: arguments on a GPU, rotated past its cache, checked.

Times are medians of CUDA-graph replays. Weights and caches exist in so many copies that none is
still in L2 when its turn comes; every call's result is compared with its fp64 twin before it is
timed, on an output that was NaN before.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.triton.attention import decode_attention
from kernels.triton.common import Workspace
from kernels.triton.fp8_block import fp8_block_linear, pack_fp8_block
from kernels.triton.fused import add_rms_norm, quantize_rows, silu_mul
from kernels.triton.linear import DenseWeight, linear
from kernels.triton.prefill import prefill_attention
from kernels.triton.rope_cache import rope_write
from kernels.triton.sampling import sample
from kernels.triton.tuning import Tile
from kernels.triton.w4_many import w4a8_linear, w4a16_linear
from kernels.triton.w4a8 import pack_w4a8
from kernels.triton.w4a16 import pack_w4a16
from kernels.triton.w8a8 import pack_w8a8, w8a8_linear
from kernels.triton.w8a16 import pack_w8a16, w8a16_linear
from kernels.triton.w16a16 import w16a16_linear

ROTATED = 300e6  # bytes that are read between two uses of a copy; L2 holds 50 to 60 MB
FP8 = torch.float8_e4m3fn
VARIANTS = ("", "_g64", "_zeros")  # of weights with scales of groups


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
        operations: Sums and products of 16 bits, where they are the limit.
    """

    name: str
    nbytes: int
    copies: int
    call: Callable[[int, Any], Tensor]
    error: Callable[[Tensor], float]
    tolerance: float
    operations: float = 0.0

    def check(self, cut: Any = None) -> float:
        """The error of one call; raises ValueError where it is too large or NaN."""
        found = self.error(self.call(0, cut))
        if not found < self.tolerance:
            raise ValueError(f"{self.name} with {cut}: error {found}, allowed is {self.tolerance}")
        return found

    def time(self, cut: Any = None) -> float:
        """Microseconds of one call."""
        return timed(lambda i: self.call(i, cut), self.copies)


def timed(call: Callable[[int], object], copies: int, repeats: int = 20) -> float:
    """Median microseconds of call(i), i cycling over `copies`, of replays of a CUDA graph."""
    for i in range(2):
        call(i % copies)
    inner = max(copies, 8)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(inner):
            call(i % copies)
    for _ in range(2):
        graph.replay()
        settle()
    for _ in range(10):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


def settle() -> None:
    """Wait: timings straight after fp64 work came out up to a fifth too long."""
    torch.cuda.synchronize()
    time.sleep(0.05)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if anything is NaN."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def gemm(
    family: str, rows: int, outputs: int, inputs: int, workspace: Workspace,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:  # fmt: skip
    """A linear layer of a family: w4a16, w4a8 or w8a16 and a variant, w8a8, fp8, fp8_block, w16a16.

    Results are in `dtype`. Of 4 bits groups are 128 inputs long, of 8 bits all, but in a variant.
    """
    group = 64 if family.endswith("_g64") else 128 if family.startswith("w4") else inputs
    bits = 16 if family == "w16a16" else (4 if family.startswith("w4") else 8) + 32 / group
    nbytes = int(outputs * inputs * bits / 8)
    copies = max(1, min(32, int(ROTATED / nbytes) + 1))
    shape = (rows, outputs, inputs)
    if family in ("w8a8", "fp8"):
        call, wanted = _w8a8(family, *shape, copies, workspace, dtype)
    elif family == "w16a16":
        call, wanted = _w16a16(*shape, copies, workspace, dtype)
    elif family == "fp8_block":
        call, wanted = _fp8_block(*shape, copies, workspace, dtype)
    else:
        call, wanted = _grouped(family, *shape, group, copies, workspace, dtype)
    nbytes += rows * (inputs * (2 if "a16" in family else 1) + outputs * 2)
    tolerance = 1e-2 if family.startswith("fp8") else 1e-3 if dtype == torch.float16 else 4e-3
    return Problem(
        f"{family} {outputs}x{inputs} M={rows} {str(dtype)[6:]}", nbytes, copies, call,
        lambda y: relative(y, wanted), tolerance,
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


def _grouped(family, rows, outputs, inputs, group, copies, workspace, dtype):
    bits, zeros = int(family[1]), family.endswith("_zeros")
    sets = [grouped_weight(bits, outputs, inputs, group, zeros) for _ in range(copies)]
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


def cache(
    pages: int, dtype: torch.dtype, per_token: bool, copies: int
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor] | list[None]]:
    """(copies of K and V pages of 8 heads of 128, their scales)."""

    def random(*shape: int) -> Tensor:
        integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return integers.to(dtype) if dtype.itemsize == 1 else integers.to(dtype).mul_(0.015)

    pools = [(random(pages, 8, 64, 128), random(pages, 8, 128, 64)) for _ in range(copies)]
    if dtype.itemsize == 2:
        return pools, [None, None]
    shape = (pages, 8, 64) if per_token else (8,)
    scales = [torch.rand(shape, device="cuda") * 0.01 + 0.01 for _ in "kv"]
    return pools, [scale.half() for scale in scales] if per_token else scales


def attention(
    sequences: int, context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False, implementation: Callable[..., Tensor] = decode_attention,
) -> Problem:  # fmt: skip
    """Decode attention, 32 query and 8 KV heads of 128, sequences of equal length."""
    heads, dim, pages = 8, 128, sequences * context // 64
    nbytes = pages * heads * 64 * (dim * 2 * dtype.itemsize + (4 if per_token else 0))
    copies = max(1, min(8, int(ROTATED / nbytes) + 1))
    pools, scales = cache(pages, dtype, per_token, copies)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(sequences, 4 * heads, dim, device="cuda", dtype=torch.bfloat16)
    rest = (tables, lengths, *scales, dim**-0.5)
    wanted = twins.decode_attention(q, *pools[0], *rest)
    kind = f"{str(dtype)[6:]} {'per token' if per_token else 'per head'}"
    return Problem(
        f"attention {kind if dtype.itemsize == 1 else str(dtype)[6:]} ({sequences}, {context})",
        nbytes, copies, lambda i, cut: implementation(q, *pools[i], *rest, workspace, cut=cut),
        lambda y: relative(y, wanted), 4e-3,
    )  # fmt: skip


def prefill(
    new: tuple[int, ...], context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False,
) -> Problem:  # fmt: skip
    """Attention of `new` tokens of sequences of equal length, shaped as for decode attention.

    Those with one new token come first, and are counted as decodes.
    """
    heads, dim, pages = 8, 128, len(new) * context // 64
    pools, scales = cache(pages, dtype, per_token, 2)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(len(new), -1)
    lengths = torch.full((len(new),), context, dtype=torch.int32, device="cuda")
    starts = torch.tensor((0, *new), device="cuda").cumsum(0).int()
    operand = torch.float16 if dtype.itemsize == 1 else dtype
    q = torch.randn(sum(new), 4 * heads, dim, device="cuda", dtype=operand)
    rest, decodes = (tables, starts, lengths, *scales, dim**-0.5), sum(n == 1 for n in new)
    wanted = twins.prefill_attention(q[-512:], *pools[0], *_last(rest, 512))
    kind = f"{str(dtype)[6:]}{' per token' if per_token else ''}"
    seen = sum(n * (context - (n - 1) / 2) for n in new)
    many = f"{decodes} x 1 + " if decodes else ""
    return Problem(
        f"prefill {kind} {many}{len(new) - decodes} x {new[-1]} of {context}",
        pages * heads * 128 * dim * dtype.itemsize, 2,
        lambda i, block: prefill_attention(
            q, *pools[i], *rest, workspace, None, decodes, None, torch.bfloat16, block
        ),
        lambda y: relative(y[-512:], wanted), 4e-3, 4 * seen * 4 * heads * dim,
    )  # fmt: skip


def _last(rest: tuple, count: int) -> tuple:
    """What the twin takes for the last `count` queries alone, all of the last sequence."""
    tables, starts, lengths, k_scale, v_scale, factor = rest
    starts = torch.tensor([0, min(count, int(starts[-1] - starts[-2]))])
    return tables[-1:], starts, lengths[-1:], k_scale, v_scale, factor


def norm(
    rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> Problem:
    """Sum, norm and quantization of rows."""
    copies = max(1, min(32, int(ROTATED / (rows * size * 6)) + 1))
    x, other = (torch.randn(copies, rows, size, device="cuda").bfloat16() for _ in "ab")
    weight = torch.rand(size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        wanted = twins.add_rms_norm(x[0], other[0], weight, 1e-6, None, dtype, group)[0]
        return relative(y, wanted.double())

    return Problem(
        f"add + norm -> {_kind(dtype, group)} {rows}x{size}", rows * size * (6 + dtype.itemsize),
        copies, lambda i, cut: add_rms_norm(x[i], other[i], weight, 1e-6, None, dtype, group)[0],
        error, 4e-3,
    )  # fmt: skip


def _kind(dtype: torch.dtype, group: int | None) -> str:
    return str(dtype)[6:] + (f" by {group}" if group else "")


def silu(
    rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> Problem:
    """SwiGLU's product and quantization of rows."""
    copies = max(1, min(32, int(ROTATED / (rows * size * 4)) + 1))
    x = torch.randn(copies, rows, 2 * size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        return relative(y, twins.silu_mul(x[0], None, dtype, group)[0].double())

    return Problem(
        f"silu * up -> {_kind(dtype, group)} {rows}x{size}", rows * size * (4 + dtype.itemsize),
        copies, lambda i, cut: silu_mul(x[i], None, dtype, group)[0], error,
        4e-3,
    )  # fmt: skip


def rows_of(rows: int, size: int, dtype: torch.dtype = FP8, group: int | None = None) -> Problem:
    """Quantization of plain rows."""
    copies = max(1, min(32, int(ROTATED / (rows * size * 2)) + 1))
    x = torch.randn(copies, rows, size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        return relative(y, twins.quantize_rows(x[0], None, dtype, group)[0].double())

    return Problem(
        f"rows -> {_kind(dtype, group)} {rows}x{size}", rows * size * (2 + dtype.itemsize), copies,
        lambda i, cut: quantize_rows(x[i], None, dtype, group)[0], error,
        4e-3,
    )  # fmt: skip


SAMPLINGS = {  # temperature, top_k, top_p, standard deviation of the logits
    "greedy": (0.0, 0, 1.0, 4.0),
    "temperature": (0.8, 0, 1.0, 4.0),
    "top_k 50": (0.8, 50, 1.0, 4.0),
    "top_p 0.9": (0.8, 0, 0.9, 4.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, 4.0),
    "top_p 0.9, nearly even": (1.0, 0, 0.9, 0.5),
}


def sampling(rows: int, vocabulary: int, kind: str, workspace: Workspace) -> Problem:
    """A token for every row of fp32 logits that the GEMM before has left in L2."""
    temperature, top_k, top_p, deviation = SAMPLINGS[kind]
    logits = torch.randn(rows, vocabulary, device="cuda") * deviation
    each = [torch.full((rows,), x, device="cuda") for x in (temperature, top_k, top_p)]
    seeds, steps = (torch.arange(rows, device="cuda") + i for i in (2**40, 7))
    rest = (each[0], each[1].int(), each[2], seeds, steps)
    wanted = twins.sample(logits, *rest)
    return Problem(
        f"sample {kind} ({rows}, {vocabulary})", logits.nbytes, 1,
        lambda i, cut: sample(logits, *rest, workspace),
        lambda y: (y != wanted).double().mean().item(), 1e-9,
    )  # fmt: skip


def rope(rows: int, per_token: bool = True, start: int = 0) -> Problem:
    """Rotation, quantization and cache write from a place on, 32 query and 8 KV heads of 128."""
    pages, dim = -(-rows // 64) * 2, 128
    copies = max(1, min(8, int(ROTATED / (rows * 6144 * 2)) + 1))
    x = torch.randn(copies, rows, 48, dim, device="cuda").bfloat16()
    angles = (torch.rand(rows, dim // 2, device="cuda") * 6).repeat(1, 2)
    slots = torch.arange(rows, device="cuda") + start
    pools = [torch.zeros(pages, 8, *s, dtype=torch.int8, device="cuda") for s in ((64, dim),)]
    pools.append(torch.zeros(pages, 8, dim, 64, dtype=torch.int8, device="cuda"))
    shape = (pages, 8, 64) if per_token else (8,)
    scales = [torch.full(shape, 0.03, device="cuda") for _ in "kv"]
    rest = (angles.cos(), angles.sin(), *pools, slots, *scales)

    def parts(i: int) -> tuple[Tensor, ...]:
        return x[i, :, :32], x[i, :, 32:40], x[i, :, 40:]

    def error(y: Tensor) -> float:
        found = [pool.clone() for pool in pools]
        count = min(rows, 256)
        few = [t[:count] for t in (*parts(0), angles.cos(), angles.sin())]
        wanted = twins.rope_write(*few, *pools, slots[:count], *scales)
        off = max((a.int() - b.int()).abs().max().item() for a, b in zip(found, pools, strict=True))
        return relative(y[:count], wanted.double()) if off <= 1 else float("nan")

    return Problem(
        f"rope + quantize + write {rows}{f' from {start} on' if start else ''}",
        rows * 6144 * 2 + rows * (8192 + 2048), copies,
        lambda i, cut: rope_write(*parts(i), *rest), error, 4e-3,
    )  # fmt: skip
