"""Attention that tuning and benchmarks run: see `kernels.bench.problems`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.problems import Problem
from kernels.bench.shapes import Attention
from kernels.bench.timing import copies_of, relative
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.common import Workspace


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
    copies = copies_of(nbytes, 8)
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
        lambda y: relative(y, wanted), 4e-3, shape=Attention(sequences, context),
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
        Attention(len(new), context, new[0], len(set(new)) == 1),
    )  # fmt: skip


def _last(rest: tuple, count: int) -> tuple:
    """What the twin takes for the last `count` queries alone, all of the last sequence."""
    tables, starts, lengths, k_scale, v_scale, factor = rest
    starts = torch.tensor([0, min(count, int(starts[-1] - starts[-2]))])
    return tables[-1:], starts, lengths[-1:], k_scale, v_scale, factor
