"""Attention over latents on a GPU, for benchmarks; see `kernels.bench.case`.

Of DeepSeek's sizes: latents of 512 numbers, rotated keys of 64; 16 heads are V2-Lite's, 128 V3's.
The floor of decode is what the cache holds of the sequences, read once: 576 bytes a token in int8,
1152 in 16 bits.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch

import kernels.triton.reference as twins
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.bench.case import BenchCase
from kernels.bench.draw import relative
from kernels.bench.shapes import AttentionShape
from kernels.bench.timing import copies_of
from kernels.triton.attention.latent import latent_attention
from kernels.triton.common import Workspace

RANK, TURN, SCALE = 512, 64, 192**-0.5


CHECKED = 64  # queries of a prompt that are compared


def cache(pages: int, dtype: torch.dtype, copies: int) -> list[KVPool]:
    """Copies of a pool of latents, random, that share their scales."""

    def random(size: int) -> torch.Tensor:
        shape = (pages, 1, 64, size)
        integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return integers if dtype == torch.int8 else integers.to(dtype).mul_(0.015)

    scales = [torch.rand(1, size, device="cuda") * 0.01 + 0.01 for size in (TURN, RANK)]
    pools = [KVPool(random(TURN), random(RANK)) for _ in range(copies)]
    if dtype != torch.int8:
        return pools
    return [replace(pool, k_scale=scales[0], v_scale=scales[1]) for pool in pools]


def latents(
    sequences: int,
    context: int,
    workspace: Workspace,
    dtype: torch.dtype = torch.int8,
    heads: int = 16,
    new: int = 1,
) -> BenchCase:
    """Attention of the last `new` tokens of sequences of equal length."""
    pages, name = sequences * context // 64, str(dtype)[6:]
    nbytes = sequences * context * (RANK + TURN) * dtype.itemsize
    copies = copies_of(nbytes, most=8)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    starts = None
    if new > 1:
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * new
    q = torch.randn(heads, sequences * new, RANK, device="cuda", dtype=torch.bfloat16)
    q = q.transpose(0, 1) / 8
    rotated = torch.randn(sequences * new, heads, TURN, device="cuda", dtype=torch.bfloat16)
    each = [
        AttentionInputs(pool, tables, lengths, starts, SCALE)
        for pool in cache(pages, dtype, copies)
    ]
    last = min(CHECKED, new)
    ends = AttentionInputs(each[0].pool, tables[-1:], lengths[-1:], torch.tensor([0, last]), SCALE)
    wanted = twins.latent_attention(q[-last:], rotated[-last:], ends)
    seen = sequences * sum(context - i for i in range(new))
    op = "latents" if new == 1 else f"latents, {new} new,"
    return BenchCase(
        f"{op} {heads} heads, {name} ({sequences}, {context})",
        AttentionShape(
            sequences, context, new, True, name, heads, 1, RANK, kind="latents of DeepSeek"
        ),
        lambda i, tiles: latent_attention(q, rotated, each[i], workspace, tiles=tiles),
        copies,
        nbytes,
        lambda y: relative(y[-last:], wanted),
        4e-3,
        2 * seen * heads * (2 * RANK + TURN),
    )
