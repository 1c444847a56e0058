"""Attention on a GPU, for benchmarks and tuning; see `kernels.bench.case`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.case import BenchCase
from kernels.bench.draw import relative
from kernels.bench.shapes import Attention
from kernels.bench.timing import copies_of
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.common import Workspace
from kernels.triton.tuning import Block, Cut, attention_cut, prefill_block

HEADS, DIM = 8, 128  # KV heads, each with four query heads
CHECKED = 512  # queries of a prefill that are compared
PLAIN_BLOCKS = (Block(64, 64, 4, 3), Block(128, 64, 8, 3))


def cache(
    pages: int, dtype: torch.dtype, per_token: bool, copies: int
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor] | list[None]]:
    """(copies of K and V pages, their scales)."""

    def random(*shape: int) -> Tensor:
        integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return integers.to(dtype) if dtype.itemsize == 1 else integers.to(dtype).mul_(0.015)

    pools = [(random(pages, HEADS, 64, DIM), random(pages, HEADS, DIM, 64)) for _ in range(copies)]
    if dtype.itemsize == 2:
        return pools, [None, None]
    shape = (pages, HEADS, 64) if per_token else (HEADS,)
    scales = [torch.rand(shape, device="cuda") * 0.01 + 0.01 for _ in "kv"]
    return pools, [scale.half() for scale in scales] if per_token else scales


def attention(
    sequences: int, context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False, implementation: Callable[..., Tensor] = decode_attention,
) -> BenchCase:  # fmt: skip
    """Decode attention of sequences of equal length."""
    pages, name = sequences * context // 64, str(dtype)[6:]
    nbytes = pages * HEADS * 64 * (DIM * 2 * dtype.itemsize + (4 if per_token else 0))
    copies = copies_of(nbytes, most=8)
    pools, scales = cache(pages, dtype, per_token, copies)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(sequences, 4 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    rest = (tables, lengths, *scales, DIM**-0.5)
    wanted = twins.decode_attention(q, *pools[0], *rest)
    own = attention_cut(q.device, sequences, HEADS, context // 64, _kind(scales))
    shared = (max(1, own.splits * own.warps // 4), own.splits)
    kind = name if dtype.itemsize == 2 else f"{name} {'per token' if per_token else 'per head'}"
    return BenchCase(
        f"attention {kind} ({sequences}, {context})",
        Attention(sequences, context, cache=name),
        lambda i, cut: implementation(q, *pools[i], *rest, workspace, cut=cut), copies, nbytes,
        lambda y: relative(y, wanted), 4e-3,
        twins=() if own.stages else tuple(Cut(4, n, 3) for n in dict.fromkeys(shared)),
    )  # fmt: skip


def _kind(scales: list[Tensor] | list[None]) -> int:
    """What tables of tiles tell caches apart by: the dimensions of their scales, 0 for none."""
    return 0 if scales[0] is None else scales[0].dim()


def prefill(
    new: tuple[int, ...], context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False,
) -> BenchCase:  # fmt: skip
    """Attention of `new` tokens of sequences of equal length.

    Those with one new token come first, and are counted as decodes.
    """
    pages, name = len(new) * context // 64, str(dtype)[6:]
    pools, scales = cache(pages, dtype, per_token, 2)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(len(new), -1)
    lengths = torch.full((len(new),), context, dtype=torch.int32, device="cuda")
    starts = torch.tensor((0, *new), device="cuda").cumsum(0).int()
    operand = torch.float16 if dtype.itemsize == 1 else dtype
    q = torch.randn(sum(new), 4 * HEADS, DIM, device="cuda", dtype=operand)
    rest, decodes = (tables, starts, lengths, *scales, DIM**-0.5), sum(n == 1 for n in new)
    wanted = twins.prefill_attention(q[-CHECKED:], *pools[0], *_last(rest, CHECKED))
    kind = f"{name}{' per token' if per_token else ''}"
    seen = sum(n * (context - (n - 1) / 2) for n in new)
    many = f"{decodes} x 1 + " if decodes else ""
    own = prefill_block(q.device, (len(q) - decodes) * 4 * HEADS, DIM, _kind(scales))
    return BenchCase(
        f"prefill {kind} {many}{len(new) - decodes} x {new[-1]} of {context}",
        Attention(len(new), context, new[0], len(set(new)) == 1, name),
        lambda i, block: prefill_attention(
            q, *pools[i], *rest, workspace, None, decodes, None, torch.bfloat16, block
        ),
        2, pages * HEADS * 128 * DIM * dtype.itemsize,
        lambda y: relative(y[-CHECKED:], wanted), 4e-3, 4 * seen * 4 * HEADS * DIM,
        twins=() if own.stages else PLAIN_BLOCKS,
    )  # fmt: skip


def _last(rest: tuple, count: int) -> tuple:
    """What the twin takes for the last `count` queries alone, all of the last sequence."""
    tables, starts, lengths, k_scale, v_scale, factor = rest
    starts = torch.tensor([0, min(count, int(starts[-1] - starts[-2]))])
    return tables[-1:], starts, lengths[-1:], k_scale, v_scale, factor
