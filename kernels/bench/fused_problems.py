"""Fused elementwise kernels and sampling: see `kernels.bench.problems`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.problems import FP8, Problem
from kernels.bench.shapes import Traffic
from kernels.bench.timing import copies_of, relative
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.common import Workspace
from kernels.triton.fused import add_rms_norm, quantize_rows, silu_mul
from kernels.triton.sampling.sample import sample


def norm(
    rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> Problem:
    """Sum, norm and quantization of rows."""
    copies = copies_of(rows * size * 6)
    x, other = (torch.randn(copies, rows, size, device="cuda").bfloat16() for _ in "ab")
    weight = torch.rand(size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        wanted = twins.add_rms_norm(x[0], other[0], weight, 1e-6, None, dtype, group)[0]
        return relative(y, wanted.double())

    nbytes = rows * size * (6 + dtype.itemsize)
    return Problem(
        f"add + norm -> {_kind(dtype, group)} {rows}x{size}", nbytes,
        copies, lambda i, cut: add_rms_norm(x[i], other[i], weight, 1e-6, None, dtype, group)[0],
        error, 4e-3, shape=Traffic(nbytes),
    )  # fmt: skip


def _kind(dtype: torch.dtype, group: int | None) -> str:
    return str(dtype)[6:] + (f" by {group}" if group else "")


def silu(
    rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> Problem:
    """SwiGLU's product and quantization of rows."""
    copies = copies_of(rows * size * 4)
    x = torch.randn(copies, rows, 2 * size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        return relative(y, twins.silu_mul(x[0], None, dtype, group)[0].double())

    nbytes = rows * size * (4 + dtype.itemsize)
    return Problem(
        f"silu * up -> {_kind(dtype, group)} {rows}x{size}", nbytes,
        copies, lambda i, cut: silu_mul(x[i], None, dtype, group)[0], error,
        4e-3, shape=Traffic(nbytes),
    )  # fmt: skip


def rows_of(rows: int, size: int, dtype: torch.dtype = FP8, group: int | None = None) -> Problem:
    """Quantization of plain rows."""
    copies = copies_of(rows * size * 2)
    x = torch.randn(copies, rows, size, device="cuda").bfloat16()

    def error(y: Tensor) -> float:
        return relative(y, twins.quantize_rows(x[0], None, dtype, group)[0].double())

    nbytes = rows * size * (2 + dtype.itemsize)
    return Problem(
        f"rows -> {_kind(dtype, group)} {rows}x{size}", nbytes, copies,
        lambda i, cut: quantize_rows(x[i], None, dtype, group)[0], error,
        4e-3, shape=Traffic(nbytes),
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
    copies = copies_of(rows * 6144 * 2, 8)
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

    nbytes = rows * 6144 * 2 + rows * (8192 + 2048)
    return Problem(
        f"rope + quantize + write {rows}{f' from {start} on' if start else ''}",
        nbytes, copies,
        lambda i, cut: rope_write(*parts(i), *rest), error, 4e-3, shape=Traffic(nbytes),
    )  # fmt: skip
