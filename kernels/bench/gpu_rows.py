"""Fused ops on rows on a GPU, and sampling, for benchmarks; see `kernels.bench.case`."""

# pyright: reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

import kernels.triton.fused as fused
import kernels.triton.reference as twins
from kernels.attention_inputs import KVPool
from kernels.bench.case import BenchCase, copies_of
from kernels.bench.draw import FP8, relative
from kernels.bench.shapes import Gemm, Rows, Selection
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.common import Workspace
from kernels.triton.sampling.edits import LISTED, Edits
from kernels.triton.sampling.sample import sample

READ = {"norm": 6, "silu": 4, "quantize": 2}  # bytes of an element; two of norm's are its sum
NAMES = {"norm": "add + norm", "silu": "silu * up", "quantize": "rows"}


def quantized(
    op: str, rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> BenchCase:
    """An op whose rows come out quantized, or in 16 bits.

    Args:
        op: `norm` (sum and norm), `silu` (SwiGLU's product) or `quantize` (plain rows).
        rows: Of the input.
        size: Elements of a row that comes out.
        dtype: Of what comes out.
        group: Elements that share a scale; None for all of a row.
    """
    copies = copies_of(rows * size * READ[op])
    width = 2 * size if op == "silu" else size
    x, other = (torch.randn(copies, rows, width, device="cuda").bfloat16() for _ in "ab")
    weight = torch.rand(size, device="cuda").bfloat16()

    def run(library: ModuleType, i: int) -> Tensor:
        if op == "norm":
            return library.add_rms_norm(x[i], other[i], weight, 1e-6, None, dtype, group)[0]
        name = "gated_product" if op == "silu" else "quantize_rows"
        return getattr(library, name)(x[i], None, dtype, group)[0]

    nbytes = rows * size * (READ[op] + dtype.itemsize)
    kind = str(dtype)[6:] + (f" by {group}" if group else "")
    return BenchCase(
        f"{NAMES[op]} -> {kind} {rows}x{size}", Rows(op, rows, size, nbytes),
        lambda i, cut: run(fused, i), copies, nbytes,
        lambda y: relative(y, run(twins, 0).double()), 4e-3,
    )  # fmt: skip


def before(shape: Gemm, quantize: bool) -> BenchCase:
    """The op before a layer, which ends in the quantization of its inputs or does not.

    SwiGLU's product before a layer that makes rows shorter, the norm before others.
    """
    dtype, group = torch.bfloat16, None
    if quantize and shape.family.startswith("fp8"):
        dtype, group = FP8, 128 if shape.family == "fp8_block" else None
    elif quantize:
        dtype = torch.int8
    op = "silu" if shape.inputs > shape.outputs else "norm"
    return quantized(op, shape.rows, shape.inputs, dtype, group)


SAMPLINGS = {  # temperature, top_k, top_p, standard deviation of the logits
    "greedy": (0.0, 0, 1.0, 4.0),
    "temperature": (0.8, 0, 1.0, 4.0),
    "top_k 50": (0.8, 50, 1.0, 4.0),
    "top_p 0.9": (0.8, 0, 0.9, 4.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, 4.0),
    "top_p 0.9, nearly even": (1.0, 0, 0.9, 0.5),
}
EDITS = ("nothing", "bias", "min_p", "mask", "all")  # of the rows, where the sampler may edit them


def edited_sampling(rows: int, vocabulary: int, kind: str, workspace: Workspace) -> BenchCase:
    """`sampling` with temperature, where each row asks for so much; beside it, `sampling` itself.

    Biases are of 300 tokens and zero, so that a row stays as it is from call to call.
    """
    logits = torch.randn(rows, vocabulary, device="cuda") * 4.0
    seeds, steps = (torch.arange(rows, device="cuda") + i for i in (2**40, 7))
    full = partial(torch.full, (rows,), device="cuda")
    rest = (full(0.8), full(0).int(), full(1.0), seeds, steps)
    least = full(0.05).log() if kind in ("min_p", "all") else full(-torch.inf)
    ids = torch.rand(rows, vocabulary, device="cuda").topk(LISTED).indices.int()
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), device="cuda").int()
    numbers = torch.arange(rows, device="cuda")
    edits = Edits(
        ids, torch.zeros(rows, LISTED, device="cuda"), words, lists=numbers,
        starts=full(0).int(), ends=full(300 if kind in ("bias", "all") else 0).int(),
        mask_rows=numbers.int() if kind in ("mask", "all") else full(-1).int(),
    )  # fmt: skip
    wanted = twins.sample(edits.applied(logits), *rest, least)
    return BenchCase(
        f"sample, edits: {kind} ({rows}, {vocabulary})",
        Rows("sample", rows, vocabulary, logits.nbytes),
        lambda i, cut: sample(logits, *rest, workspace, log_min_p=least, edits=edits), 1,
        logits.nbytes, lambda y: (y != wanted).double().mean().item(), 1e-9,
    )  # fmt: skip


def sampling(rows: int, vocabulary: int, kind: str, workspace: Workspace) -> BenchCase:
    """A token for every row of fp32 logits that the GEMM before has left in L2."""
    temperature, top_k, top_p, deviation = SAMPLINGS[kind]
    logits = torch.randn(rows, vocabulary, device="cuda") * deviation
    each = [torch.full((rows,), x, device="cuda") for x in (temperature, top_k, top_p)]
    seeds, steps = (torch.arange(rows, device="cuda") + i for i in (2**40, 7))
    rest = (each[0], each[1].int(), each[2], seeds, steps)
    wanted = twins.sample(logits, *rest)
    return BenchCase(
        f"sample {kind} ({rows}, {vocabulary})", Rows("sample", rows, vocabulary, logits.nbytes),
        lambda i, cut: sample(logits, *rest, workspace), 1, logits.nbytes,
        lambda y: (y != wanted).double().mean().item(), 1e-9,
    )  # fmt: skip


def rope(rows: int, start: int = 0) -> BenchCase:
    """Rotation, quantization and cache write from a place on, 32 query and 8 KV heads of 128."""
    pages, dim = -(-rows // 64) * 2, 128
    copies = copies_of(rows * 6144 * 2, most=8)
    x = torch.randn(copies, rows, 48, dim, device="cuda").bfloat16()
    angles = (torch.rand(rows, dim // 2, device="cuda") * 6).repeat(1, 2)
    slots = torch.arange(rows, device="cuda") + start
    shapes = ((pages, 8, 64, dim), (pages, 8, dim, 64))
    pools = [torch.zeros(size, dtype=torch.int8, device="cuda") for size in shapes]
    scales = [torch.full((pages, 8, 64), 0.03, device="cuda") for _ in "kv"]
    turns, pool = (angles.cos(), angles.sin()), KVPool(*pools, *scales, dynamic=True)

    def parts(i: int) -> tuple[Tensor, ...]:
        return x[i, :, :32], x[i, :, 32:40], x[i, :, 40:]

    def error(y: Tensor) -> float:
        found = [t.clone() for t in pools]
        count = min(rows, 256)
        few = [t[:count] for t in (*parts(0), *turns)]
        wanted = twins.rope_write(*few, pool, slots[:count])
        off = max((a.int() - b.int()).abs().max().item() for a, b in zip(found, pools, strict=True))
        return relative(y[:count], wanted.double()) if off <= 1 else float("nan")

    nbytes = rows * 6144 * 2 + rows * (8192 + 2048)
    return BenchCase(
        f"rope + quantize + write {rows}{f' from {start} on' if start else ''}",
        Rows("rope", rows, 6144, nbytes),
        lambda i, cut: rope_write(*parts(i), *turns, pool, slots), copies, nbytes, error, 4e-3,
    )  # fmt: skip


def of_fused(_: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """Norm, SwiGLU and rotation, decode and prefill; with float rows, what quantization adds. Of
    the table those of 4096 tokens of 4096."""
    if selection.table:
        for dtype in (torch.int8, FP8):
            yield quantized("norm", 4096, 4096, dtype)
            yield quantized("silu", 4096, 4096, dtype)
        yield quantized("silu", 4096, 14336)
        yield rope(4096)
        return
    for rows in (1, 64, 4096):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield quantized("norm", rows, 4096, dtype)
            yield quantized("silu", rows, 14336, dtype)
        for group in (None, 128):
            yield quantized("quantize", rows, 4096, FP8, group)
        yield quantized("norm", rows, 4096, FP8, 128)
        yield quantized("silu", rows, 14336, FP8, 128)
        yield rope(rows)
    yield rope(4096, start=37)


def of_sampling(workspace: Workspace, _: Selection) -> Iterator[BenchCase]:
    """Tokens from the logits of a Llama-3 vocabulary."""
    for rows in (1, 16, 64):
        for kind in SAMPLINGS:
            yield sampling(rows, 128256, kind, workspace)
    for rows in (1, 64, 256):
        yield sampling(rows, 128256, "temperature", workspace)
        for kind in EDITS:
            yield edited_sampling(rows, 128256, kind, workspace)


CASES = {"fused": of_fused, "sampling": of_sampling}  # what makes the cases of a family
