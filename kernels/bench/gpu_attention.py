"""Attention on a GPU, over keys and values or over latents, for benchmarks and tuning; see
`kernels.bench.case`.

Latents are of DeepSeek's sizes: 512 numbers, rotated keys of 64; 16 heads are V2-Lite's, 128 V3's.
The floor of their decode is what the cache holds of the sequences, read once: 576 bytes a token in
int8, 1152 in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.bench.case import FP8, BenchCase, copies_of, relative
from kernels.bench.shapes import DECODE, PREFILL, AttentionShape, Selection
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.latent import latent_attention
from kernels.triton.attention.paged_cache import scale_kind
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.common import Workspace
from kernels.triton.tuning import KVSplit, PrefillTile, kv_split, prefill_tile

MIXED, FEW = (*(1,) * 16, 1024), (128,)  # new tokens: beside decodes, after a long context
KINDS_DECODE = ((1, 4096), (16, 4096), (64, 1024))
KINDS_PREFILL = (((1024,), 1024), ((1024,), 4096))
CHECKED = 512  # queries of a prefill that are compared
PLAIN_TILES = (PrefillTile(64, 64, 4, 3), PrefillTile(128, 64, 8, 3))
RANK, TURN, SCALE = 512, 64, 192**-0.5  # of latents
CHECKED_LATENTS = 64  # queries of a prompt over latents that are compared


@dataclass(frozen=True)
class Kind:
    """What attention is of; by default that of a Llama-3-8B.

    Attributes:
        name: A model with such attention; none for the default.
        heads: Query heads.
        dim: Size of a head.
        window: Positions that a query sees, or None for all.
        softcap: Bound of the logits, or None.
        sinks: Whether each head has a logit beside them.
    """

    name: str = ""
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def inputs(
        self, pool: KVPool, tables: Tensor, lengths: Tensor, starts: Tensor | None = None
    ) -> AttentionInputs:
        """What attention of this kind is given beside its queries."""
        sinks = torch.zeros(self.heads, device=tables.device) if self.sinks else None
        return AttentionInputs(
            pool, tables, lengths, starts, self.dim**-0.5, self.window, self.softcap, sinks
        )

    def seen(self, context: int) -> int:
        """Tokens that the last of so many sees."""
        return min(context, self.window or context)


LLAMA = Kind()
KINDS = (
    Kind("gemma 3", 8, 4, 256),
    Kind("gemma 3 window", 8, 4, 256, window=1024),
    Kind("gemma 4", 8, 1, 512),
    Kind("gemma 2", 16, 8, 256, softcap=50.0),
    Kind("phi 3 mini", 32, 32, 96),
    Kind("gpt-oss", 64, 8, 64, sinks=True),
)


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers of a cache; uint8 stands for two int4."""
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device="cuda")
    integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    return integers.to(dtype) if dtype.itemsize == 1 else integers.to(dtype).mul_(0.015)


def cache(
    pages: int, dtype: torch.dtype, per_token: bool, copies: int, kind: Kind = LLAMA,
    keys: torch.dtype | None = None,
) -> list[KVPool]:  # fmt: skip
    """Copies of a pool, random, that share their scales; types as of `_random`."""
    heads, dim, keys = kind.kv_heads, kind.dim, keys or dtype
    of_k, of_v = (dim // 2 if held == torch.uint8 else dim for held in (keys, dtype))
    pools = [
        (_random(keys, pages, heads, 64, of_k), _random(dtype, pages, heads, of_v, 64))
        for _ in range(copies)
    ]
    if dtype.itemsize == 2:
        return [KVPool(k, v) for k, v in pools]
    shape = (pages, heads, 64) if per_token else (heads,)
    scales = [torch.rand(shape, device="cuda") * 0.01 + 0.01 for _ in "kv"]
    scales = [scale.half() for scale in scales] if per_token else scales
    return [KVPool(k, v, *scales, dynamic=per_token) for k, v in pools]


def attention(
    sequences: int, context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False, kind: Kind = LLAMA, keys: torch.dtype | None = None,
) -> BenchCase:  # fmt: skip
    """Decode attention of sequences of equal length; `keys` is K's type where it is not V's."""
    pages, name, heads, dim = sequences * context // 64, _name(dtype), kind.kv_heads, kind.dim
    name = name if keys is None else f"{_name(keys)} {name}"
    bits = sum(_bits(held) for held in (keys or dtype, dtype))
    each_token = heads * (dim * bits // 8 + (4 if per_token else 0))
    nbytes = sequences * kind.seen(context) * each_token
    copies = copies_of(nbytes, most=8)
    pools = cache(pages, dtype, per_token, copies, kind, keys)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(sequences, kind.heads, dim, device="cuda", dtype=torch.bfloat16)
    each = [kind.inputs(pool, tables, lengths) for pool in pools]
    wanted = twins.decode_attention(q, each[0])
    packed = dtype == torch.uint8
    own = kv_split(q.device, sequences, heads, context // 64, scale_kind(pools[0]), dim, packed)
    splits = dict.fromkeys((max(1, own.splits * own.warps // 4), own.splits))
    plain = tuple(KVSplit(4, count, 3) for count in splits)
    held = name if dtype.itemsize == 2 else f"{name} {'per token' if per_token else 'per head'}"
    return BenchCase(
        f"{_title('attention', kind)} {held} ({sequences}, {context})",
        AttentionShape(
            sequences, context, cache=name, heads=kind.heads, kv_heads=heads, dim=dim,
            kind=kind.name,
        ),
        lambda i, split: decode_attention(q, each[i], workspace, split=split), copies, nbytes,
        lambda y: relative(y, wanted), 4e-3,
        twins=() if own.stages or kind.name else plain,
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def _bits(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.uint8 else 8 * dtype.itemsize


def _title(op: str, kind: Kind) -> str:
    return f"{op} of {kind.name}," if kind.name else op


def prefill(
    new: tuple[int, ...], context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    per_token: bool = False, kind: Kind = LLAMA,
) -> BenchCase:  # fmt: skip
    """Attention of `new` tokens of sequences of equal length.

    Those with one new token come first, and are counted as decodes.
    """
    pages, name, heads, dim = len(new) * context // 64, _name(dtype), kind.heads, kind.dim
    pools, decodes = cache(pages, dtype, per_token, 2, kind), sum(n == 1 for n in new)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(len(new), -1)
    lengths = torch.full((len(new),), context, dtype=torch.int32, device="cuda")
    starts = torch.tensor((0, *new), device="cuda").cumsum(0).int()
    operand = torch.float16 if dtype.itemsize == 1 else dtype
    q = torch.randn(sum(new), heads, dim, device="cuda", dtype=operand)
    each = [kind.inputs(pool, tables, lengths, starts) for pool in pools]
    wanted = twins.prefill_attention(q[-CHECKED:], _last(each[0], min(CHECKED, new[-1])))
    held = f"{name}{' per token' if per_token else ''}"
    seen = sum(kind.seen(context - i) for n in new for i in range(n))
    many = f"{decodes} x 1 + " if decodes else ""
    own = prefill_tile(q.device, (len(q) - decodes) * heads, dim, scale_kind(pools[0]))
    return BenchCase(
        f"{_title('prefill', kind)} {held} {many}{len(new) - decodes} x {new[-1]} of {context}",
        AttentionShape(
            len(new), context, new[0], len(set(new)) == 1, name, heads, kind.kv_heads, dim,
            kind.name,
        ),
        lambda i, tile: prefill_attention(
            q, each[i], workspace, decodes, tile=tile, out_dtype=torch.bfloat16
        ),
        2, pages * kind.kv_heads * 128 * dim * _bits(dtype) // 8,
        lambda y: relative(y[-CHECKED:], wanted), 4e-3, 4 * seen * heads * dim,
        twins=() if own.stages or kind.name else PLAIN_TILES,
    )  # fmt: skip


def _last(inputs: AttentionInputs, count: int) -> AttentionInputs:
    """The last `count` queries alone, all of the last sequence."""
    return replace(
        inputs,
        block_tables=inputs.block_tables[-1:],
        context_len=inputs.context_len[-1:],
        query_start=torch.tensor([0, count]),
    )


def latent_cache(pages: int, dtype: torch.dtype, copies: int) -> list[KVPool]:
    """Copies of a pool of latents, random, that share their scales."""
    scales = [torch.rand(1, size, device="cuda") * 0.01 + 0.01 for size in (TURN, RANK)]
    turned, own = ((pages, 1, 64, size) for size in (TURN, RANK))
    pools = [KVPool(_random(dtype, *turned), _random(dtype, *own)) for _ in range(copies)]
    if dtype != torch.int8:
        return pools
    return [replace(pool, k_scale=scales[0], v_scale=scales[1]) for pool in pools]


def latents(
    sequences: int, context: int, workspace: Workspace, dtype: torch.dtype = torch.int8,
    heads: int = 16, new: int = 1,
) -> BenchCase:  # fmt: skip
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
        for pool in latent_cache(pages, dtype, copies)
    ]
    last = min(CHECKED_LATENTS, new)
    ends = AttentionInputs(each[0].pool, tables[-1:], lengths[-1:], torch.tensor([0, last]), SCALE)
    wanted = twins.latent_attention(q[-last:], rotated[-last:], ends)
    seen = sequences * sum(context - i for i in range(new))
    op = "latents" if new == 1 else f"latents, {new} new,"
    return BenchCase(
        f"{op} {heads} heads, {name} ({sequences}, {context})",
        AttentionShape(
            sequences, context, new, True, name, heads, 1, RANK, kind="latents of DeepSeek"
        ),
        lambda i, tiles: latent_attention(q, rotated, each[i], workspace, tiles=tiles), copies,
        nbytes, lambda y: relative(y[-last:], wanted), 4e-3, 2 * seen * heads * (2 * RANK + TURN),
    )  # fmt: skip


def of_attention(workspace: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """Decode attention: int8 and int4 by head and by token, and both; e4m3 and bf16."""
    for sequences, context in DECODE:
        for dtype in (torch.int8, torch.uint8):
            for per_token in (False, True):
                yield attention(sequences, context, workspace, dtype, per_token)
        yield attention(sequences, context, workspace, torch.uint8, True, keys=torch.int8)
        for dtype in () if selection.table else (FP8, torch.bfloat16):
            yield attention(sequences, context, workspace, dtype)


def of_prefill(workspace: Workspace, _: Selection) -> Iterator[BenchCase]:
    """Prefill attention: whole prompts, chunks, and one beside decodes."""
    for new, context in (*PREFILL, (MIXED, 4096), (FEW, 65536)):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield prefill(new, context, workspace, dtype)
        for dtype in (torch.int8, torch.uint8):
            yield prefill(new, context, workspace, dtype, per_token=True)


def of_attention_kinds(workspace: Workspace, _: Selection) -> Iterator[BenchCase]:
    """Heads of other sizes, bounded logits, sinks, windows, latents: decodes, then prompts."""
    for kind in KINDS:
        for dtype in (torch.int8, torch.bfloat16):
            for sequences, context in KINDS_DECODE:
                yield attention(sequences, context, workspace, dtype, kind=kind)
            for new, context in KINDS_PREFILL:
                yield prefill(new, context, workspace, dtype, kind=kind)
    for heads in (16, 128):
        for dtype in (torch.int8, torch.bfloat16):
            for sequences, context in (*KINDS_DECODE, (64, 4096)):
                yield latents(sequences, context, workspace, dtype, heads)
            yield latents(1, 4096, workspace, dtype, heads, new=1024)


CASES = {"attention": of_attention, "prefill": of_prefill, "attention_kinds": of_attention_kinds}
"""What makes the cases of a family."""
