"""Attention on a GPU, for benchmarks and tuning; see `kernels.bench.case`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.bench.case import BenchCase
from kernels.bench.draw import relative
from kernels.bench.shapes import AttentionShape
from kernels.bench.timing import copies_of
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import scale_kind
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.common import Workspace
from kernels.triton.tuning import KVSplit, PrefillTile, kv_split, prefill_tile

HEADS, DIM = 8, 128  # KV heads, each with four query heads
CHECKED = 512  # queries of a prefill that are compared
PLAIN_TILES = (PrefillTile(64, 64, 4, 3), PrefillTile(128, 64, 8, 3))


def cache(pages: int, dtype: torch.dtype, per_token: bool, copies: int) -> list[KVPool]:
    """Copies of a pool, random, that share their scales."""

    def random(*shape: int) -> Tensor:
        integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return integers.to(dtype) if dtype.itemsize == 1 else integers.to(dtype).mul_(0.015)

    pools = [(random(pages, HEADS, 64, DIM), random(pages, HEADS, DIM, 64)) for _ in range(copies)]
    if dtype.itemsize == 2:
        return [KVPool(k, v) for k, v in pools]
    shape = (pages, HEADS, 64) if per_token else (HEADS,)
    scales = [torch.rand(shape, device="cuda") * 0.01 + 0.01 for _ in "kv"]
    scales = [scale.half() for scale in scales] if per_token else scales
    return [KVPool(k, v, *scales, dynamic=per_token) for k, v in pools]


def attention(
    sequences: int, context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False, implementation: Callable[..., Tensor] = decode_attention,
) -> BenchCase:  # fmt: skip
    """Decode attention of sequences of equal length."""
    pages, name = sequences * context // 64, str(dtype)[6:]
    nbytes = pages * HEADS * 64 * (DIM * 2 * dtype.itemsize + (4 if per_token else 0))
    copies = copies_of(nbytes, most=8)
    pools = cache(pages, dtype, per_token, copies)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(sequences, 4 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    each = [AttentionInputs(pool, tables, lengths, None, DIM**-0.5) for pool in pools]
    wanted = twins.decode_attention(q, each[0])
    own = kv_split(q.device, sequences, HEADS, context // 64, scale_kind(pools[0]))
    shared = (max(1, own.splits * own.warps // 4), own.splits)
    kind = name if dtype.itemsize == 2 else f"{name} {'per token' if per_token else 'per head'}"
    return BenchCase(
        f"attention {kind} ({sequences}, {context})",
        AttentionShape(sequences, context, cache=name),
        lambda i, split: implementation(q, each[i], workspace, split=split), copies, nbytes,
        lambda y: relative(y, wanted), 4e-3,
        twins=() if own.stages else tuple(KVSplit(4, n, 3) for n in dict.fromkeys(shared)),
    )  # fmt: skip


def prefill(
    new: tuple[int, ...], context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False,
) -> BenchCase:  # fmt: skip
    """Attention of `new` tokens of sequences of equal length.

    Those with one new token come first, and are counted as decodes.
    """
    pages, name = len(new) * context // 64, str(dtype)[6:]
    pools, decodes = cache(pages, dtype, per_token, 2), sum(n == 1 for n in new)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(len(new), -1)
    lengths = torch.full((len(new),), context, dtype=torch.int32, device="cuda")
    starts = torch.tensor((0, *new), device="cuda").cumsum(0).int()
    operand = torch.float16 if dtype.itemsize == 1 else dtype
    q = torch.randn(sum(new), 4 * HEADS, DIM, device="cuda", dtype=operand)
    each = [AttentionInputs(pool, tables, lengths, starts, DIM**-0.5) for pool in pools]
    wanted = twins.prefill_attention(q[-CHECKED:], _last(each[0], min(CHECKED, new[-1])))
    kind = f"{name}{' per token' if per_token else ''}"
    seen = sum(n * (context - (n - 1) / 2) for n in new)
    many = f"{decodes} x 1 + " if decodes else ""
    own = prefill_tile(q.device, (len(q) - decodes) * 4 * HEADS, DIM, scale_kind(pools[0]))
    return BenchCase(
        f"prefill {kind} {many}{len(new) - decodes} x {new[-1]} of {context}",
        AttentionShape(len(new), context, new[0], len(set(new)) == 1, name),
        lambda i, tile: prefill_attention(
            q, each[i], workspace, decodes, tile=tile, out_dtype=torch.bfloat16
        ),
        2, pages * HEADS * 128 * DIM * dtype.itemsize,
        lambda y: relative(y[-CHECKED:], wanted), 4e-3, 4 * seen * 4 * HEADS * DIM,
        twins=() if own.stages else PLAIN_TILES,
    )  # fmt: skip


def _last(inputs: AttentionInputs, count: int) -> AttentionInputs:
    """The last `count` queries alone, all of the last sequence."""
    return replace(
        inputs,
        block_tables=inputs.block_tables[-1:],
        context_len=inputs.context_len[-1:],
        query_start=torch.tensor([0, count]),
    )
