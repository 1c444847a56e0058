"""Attention over a paged cache of latents, for decode and for prompts (DeepSeek-V2, arXiv
2405.04434, section 2.1.2).

    keys [pages, 1, 64, P]    latents [pages, 1, 64, R]    int8, e4m3, bf16 or fp16

All heads share a token's latent c and its rotated key k: a head's logit is q c + r k with its
absorbed query q [R] and rotated query r [P], and its result a sum of latents. So a page is read
once for a tile of rows, each a query of a head,

    S = Q C^T + R K^T        O = P C

with the running maximum of FlashAttention-2 (Dao 2023) a row. Row i of a tile is query i // H and
head i % H of the H that a program has. Eight bits become fp16, exactly, and have static scales of
channels: those of the latent multiply q and the result, those of the key r.

Decode has one query a sequence and splits its pages into runs, which a kernel of its own adds up.
Tiles of prompts are found on the device, in `query_start` (`kernels.triton.attention.prefill`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.triton.attention.paged_cache import (
    HIDDEN,
    LOG2_E,
    LOWEST,
    QUANTIZED,
    TYPES,
    as_operand,
    check_fp8,
    operand_type,
)
from kernels.triton.attention.prefill import tile_of
from kernels.triton.common import Workspace, capability, overlap, require, wait
from kernels.triton.tuning import multiprocessors
from kernels.triton.versions import run_gluon

FEWEST = 16  # rows of a tile: of a product's small side
MOST = 32  # rows of a tile: the fp32 sums of each, R of them, are held in registers
TOKENS = 32  # of a page that are taken at once, and held in registers too
WGMMA_MOST = 64  # the same of `latent_hopper`
MOST_SPLITS = 32


@dataclass(frozen=True)
class LatentTile:
    """How attention over latents is cut.

    Attributes:
        heads: Of a program, a power of two.
        queries: Of a program; 1 for decode.
        splits: Programs that share the pages of a sequence; 1 for prompts.
    """

    heads: int
    queries: int = 1
    splits: int = 1


@triton.jit(do_not_specialize=["decodes", "S", "width"])
def latent_kernel(
    q, rotated, keys, latents, tables, lengths, query_start, key_scale, latent_scale, out, parts,
    softmax_scale, decodes, S, width, q_token, q_head,
    HEADS: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr, TURN_WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, PROMPTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (split, block of OWN heads, sequence, or with PROMPTS tile of QUERIES queries)."""
    wait(OVERLAP)
    split, block = tl.program_id(0), tl.program_id(1)
    if PROMPTS:
        tile = tl.num_programs(2) - 1 - tl.program_id(2)  # later tiles see more, and start first
        sequence, start, count, first = tile_of(tile, query_start, decodes, S, QUERIES)
        if first >= count:
            return
    else:
        sequence = tl.program_id(2)
        start, count, first = sequence, 1, 0
    length = tl.load(lengths + sequence).to(tl.int32)
    pages = tl.cdiv(length - count + tl.minimum(first + QUERIES, count), 64)
    share = tl.maximum(tl.cdiv(pages, SPLITS), 1)
    runs = tl.maximum(tl.cdiv(pages, share), 1)
    if split >= runs:
        return
    OPERAND: tl.constexpr = operand_type(latents.dtype.element_ty)
    i, d, r, t = (
        tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, TURN_WIDE), tl.arange(0, TOKENS)
    )  # fmt: skip
    query, head = first + i // OWN, (block * OWN + i % OWN).to(tl.int64)
    real = (query < count) & (i < OWN * QUERIES) & (head < HEADS)
    row = (start + query).to(tl.int64)
    x = load_rows(q, row * q_token + head * q_head, d, real, RANK)
    y = load_rows(rotated, (row * HEADS + head) * TURN, r, real, TURN)
    x, y = scaled(x, latent_scale, d, RANK), scaled(y, key_scale, r, TURN)
    x, y = x.to(OPERAND), y.to(OPERAND)  # [ROWS, WIDE], [ROWS, TURN_WIDE]
    position, factor = length - count + query, softmax_scale * LOG2_E
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    PARTS: tl.constexpr = 64 // TOKENS
    begin, end = split * share * PARTS, tl.minimum((split + 1) * share, pages) * PARTS
    table = tables + sequence * width
    next_c, next_k = part_of_page(
        begin, begin < end, table, latents, keys, t, d, r, RANK, TURN, TOKENS
    )
    for b in tl.range(begin, end, num_stages=1):
        c, k = as_operand(next_c), as_operand(next_k)
        next_c, next_k = part_of_page(
            b + 1, b + 1 < end, table, latents, keys, t, d, r, RANK, TURN, TOKENS
        )
        m, l, acc = attend(m, l, acc, x, y, c, k, b, t, position, factor, TOKENS)  # noqa: E741
    if SPLITS > 1:
        item = sequence * tl.num_programs(1) + block
        own = parts + (item * SPLITS + split).to(tl.int64) * (ROWS * (WIDE + 2))
        tl.store(own + i[:, None] * WIDE + d[None, :], acc)
        tl.store(own + ROWS * WIDE + i, m)
        tl.store(own + ROWS * WIDE + ROWS + i, l)
    else:
        store_rows(l, acc, out, row * HEADS + head, latent_scale, d, real, RANK)


@triton.jit
def load_rows(q, places, i, real, SIZE: tl.constexpr):
    """Rows of queries that begin at places, in fp32."""
    inside = real[:, None] & (i < SIZE)[None, :]
    return tl.load(q + places[:, None] + i[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, scale, i, SIZE: tl.constexpr):
    """Rows times a scale of each number, if there is one."""
    if scale is not None:
        x *= tl.load(scale + i, mask=i < SIZE, other=0.0)[None, :]
    return x


@triton.jit
def attend(
    m, l, acc, x, y, c, k, b, t, position, factor, TOKENS: tl.constexpr  # noqa: E741
):  # fmt: skip
    """(m, l, acc) of queries x and y after the b-th part's tokens t, of latents c and keys k."""
    s = tl.dot(x, tl.trans(c), tl.dot(y, tl.trans(k))) * factor  # [ROWS, TOKENS]
    s = tl.where((b * TOKENS + t)[None, :] <= position[:, None], s, HIDDEN)
    top = tl.maximum(m, tl.max(s, 1))
    weights, shrink = tl.exp2(s - top[:, None]), tl.exp2(m - top)
    l = l * shrink + tl.sum(weights, 1)  # noqa: E741
    return top, l, tl.dot(weights.to(c.dtype), c, acc * shrink[:, None])


@triton.jit
def store_rows(l, acc, out, row, scale, d, real, RANK: tl.constexpr):  # noqa: E741
    """Divide sums by those of their weights, scale them as latents are, and store rows of `out`."""
    z = scaled(acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None], scale, d, RANK)
    inside = real[:, None] & (d < RANK)[None, :]
    cells = out + (row * RANK)[:, None] + d[None, :]
    tl.store(cells, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def part_of_page(
    b, wanted, table, latents, keys, t, d, r,
    RANK: tl.constexpr, TURN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Latents and keys of the b-th TOKENS tokens of a sequence, if wanted, as they are cached.

    They are asked for a step ahead and held in registers: as both products of a step read a
    latent, Triton's own pipeline would not hold it in shared memory.
    """
    page = tl.load(table + b * TOKENS // 64, mask=wanted, other=0).to(tl.int64) * 64
    token = (page + b * TOKENS % 64 + t)[:, None]
    c = tl.load(latents + token * RANK + d[None, :], mask=wanted & (d < RANK)[None, :], other=0.0)
    k = tl.load(keys + token * TURN + r[None, :], mask=wanted & (r < TURN)[None, :], other=0.0)
    return c, k


@triton.jit
def add_runs_kernel(
    parts, lengths, latent_scale, out,
    HEADS: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    WIDE: tl.constexpr, SOME: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (SOME of the channels, block of OWN heads, sequence): the sums of all its runs.

    Their maxima are read at once, so that no run's sums wait for those of another.
    """
    wait(OVERLAP)
    block, sequence = tl.program_id(1), tl.program_id(2)
    pages = tl.cdiv(tl.load(lengths + sequence).to(tl.int32), 64)
    runs = tl.maximum(tl.cdiv(pages, tl.maximum(tl.cdiv(pages, SPLITS), 1)), 1)
    i, n = tl.arange(0, ROWS), tl.arange(0, PADDED)
    d = tl.program_id(0) * SOME + tl.arange(0, SOME)
    RUN: tl.constexpr = ROWS * (WIDE + 2)  # a run's acc, m and l
    first = parts + ((sequence * tl.num_programs(1) + block) * SPLITS).to(tl.int64) * RUN
    of_m = first + n[:, None] * RUN + ROWS * WIDE + i[None, :]
    all_m = tl.load(of_m, mask=(n < runs)[:, None], other=LOWEST)
    all_l = tl.load(of_m + ROWS, mask=(n < runs)[:, None], other=0.0)
    top = tl.max(all_m, 0)
    l = tl.sum(all_l * tl.exp2(all_m - top[None, :]), 0)  # noqa: E741
    acc = tl.zeros([ROWS, SOME], tl.float32)
    for run in tl.range(0, runs, num_stages=3):
        own = first + run * RUN
        weight = tl.exp2(tl.load(own + ROWS * WIDE + i) - top)
        acc += tl.load(own + i[:, None] * WIDE + d[None, :]) * weight[:, None]
    head = block * OWN + i
    real = (i < OWN) & (head < HEADS)
    row = sequence.to(tl.int64) * HEADS + head
    store_rows(l, acc, out, row, latent_scale, d, real, RANK)


def latent_attention(
    q: Tensor,
    rotated: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    decodes: int = 0,
    *,
    tiles: tuple[LatentTile, LatentTile] | None = None,
) -> Tensor:
    """Causal attention of the new tokens of S sequences over their latents, new ones included.

    Args:
        q: fp16, bf16 or fp32 [T, Hq, R], queries times W^UK of their heads, the sequences' one
            after another; its last dimension without gaps.
        rotated: Of the same type [T, Hq, P], contiguous: the rotated part of the queries.
        inputs: With a pool for latents, finite also where no token is yet, and block tables that
            hold valid numbers throughout. Rows from the last entry of `query_start` on are not
            written.
        workspace: Of the stream that this runs in; used where sequences have one new token.
        decodes: How many sequences, first in the batch, have one new token each, where
            `query_start` tells those of the others.
        tiles: What a program takes of single tokens, and of prompts; by default by rule.

    Returns:
        [T, Hq, R] in the type of `q`, contiguous; zeros where a context is 0.

    Raises:
        ValueError: a shape or type does not fit, or logits are to be changed or windowed.
    """
    pool, tables, starts = inputs.pool, inputs.block_tables, inputs.query_start
    check_latents(pool)
    _check_queries(q, rotated, inputs)
    (tokens, heads, _), sequences = q.shape, tables.shape[0]
    singles = sequences if starts is None else decodes
    require(0 <= singles <= min(sequences, tokens), f"{singles} of {sequences} sequences decode")
    require(starts is not None or sequences == tokens, f"{sequences} tables for {tokens} queries")
    single, prompt = tiles or _tiles(q.device, singles, heads, tables.shape[1], _by_wgmma(pool))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if singles:
        _launch(q, rotated, inputs, workspace, single, out, singles)
    if starts is not None and singles < min(sequences, tokens):
        count = (tokens - singles) // prompt.queries + sequences - singles
        _launch(q, rotated, inputs, workspace, prompt, out, count, singles)
    return out


def _tiles(
    device: torch.device, sequences: int, heads: int, pages: int, wgmma: bool
) -> tuple[LatentTile, LatentTile]:
    """Tiles of single tokens and of prompts that give every multiprocessor a program, or two."""
    most = WGMMA_MOST if wgmma else MOST
    own = min(triton.next_power_of_2(heads), most)
    programs = multiprocessors(device) * (1 if wgmma else 2)
    items = max(1, sequences * triton.cdiv(heads, own))
    splits = max(1, min(programs // items, -(-pages // 2), MOST_SPLITS))
    return LatentTile(own, splits=splits), LatentTile(own, most // own)


def _launch(
    q: Tensor,
    rotated: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    tile: LatentTile,
    out: Tensor,
    programs: int,
    decodes: int | None = None,
) -> None:
    """Run the kernel for so many sequences of one token; with `decodes`, tiles of those after."""
    pool, heads = inputs.pool, q.shape[1]
    rank, turn = pool.v.shape[3], pool.k.shape[3]
    wide, rows = triton.next_power_of_2(rank), max(FEWEST, tile.heads * tile.queries)
    blocks, splits = triton.cdiv(heads, tile.heads), tile.splits
    if splits > 1:
        workspace.check(programs * blocks * splits * rows * (wide + 2), 0)
    shared = {"HEADS": heads, "OWN": tile.heads, "ROWS": rows, "SPLITS": splits}
    arguments = (
        q, rotated, pool.k, pool.v, inputs.block_tables, inputs.context_len, inputs.query_start,
        pool.k_scale, pool.v_scale, out, workspace.parts, inputs.softmax_scale, decodes or 0,
        inputs.block_tables.shape[0], inputs.block_tables.shape[1], q.stride(0), q.stride(1),
    )  # fmt: skip
    own = shared | {"QUERIES": tile.queries, "PROMPTS": decodes is not None}
    own |= overlap(early=False)
    grid = splits, blocks, programs

    def launch() -> None:
        from kernels.triton.attention import latent_hopper

        latent_hopper.launch(grid, arguments, pool.v.dtype, **own)

    shared |= {"RANK": rank, "WIDE": wide}
    fits = rows <= WGMMA_MOST and _by_wgmma(pool)
    if not (fits and run_gluon("attention over latents", launch)):
        latent_kernel[grid](
            *arguments, TURN=turn, TURN_WIDE=max(16, triton.next_power_of_2(turn)), TOKENS=TOKENS,
            num_warps=8, num_stages=1, enable_fp_fusion=True, **(own | shared),
        )  # fmt: skip
    if splits > 1:
        some = min(wide, 64)
        add_runs_kernel[(wide // some, blocks, programs)](
            workspace.parts, inputs.context_len, pool.v_scale, out, SOME=some,
            PADDED=triton.next_power_of_2(splits), num_warps=4, num_stages=3, **shared,
            **overlap(early=False),
        )  # fmt: skip


def _by_wgmma(pool: KVPool) -> bool:
    """Whether `latent_hopper` is for a cache on this device."""
    fits = pool.v.shape[3] == 512 and pool.k.shape[3] == 64
    return fits and capability() == 90 and not triton.knobs.runtime.interpret


def check_latents(pool: KVPool) -> None:
    """Raise ValueError where pages of latents and keys, and their scales, do not fit each other."""
    (pages, heads, page, turn), rank = pool.k.shape, pool.v.shape[-1]
    require(
        page == KV_BLOCK and heads == 1 and tuple(pool.v.shape) == (pages, 1, page, rank),
        f"keys are {tuple(pool.k.shape)}, latents {tuple(pool.v.shape)}; needed are one of each a "
        f"token in pages of {KV_BLOCK}",
    )
    require(
        turn % 2 == 0 and turn <= 256 and rank <= 1024,
        f"latents of {rank} and keys of {turn} numbers are not supported: at most 1024, and 256, "
        "an even number, are",
    )
    require(
        pool.k.dtype == pool.v.dtype and pool.k.dtype in TYPES,
        f"the cache is {pool.k.dtype} and {pool.v.dtype}; needed is one of int8, float8_e4m3fn, "
        "bfloat16, float16",
    )
    check_fp8(pool.k.dtype, pool.k.device)
    scaled = pool.k.dtype in QUANTIZED
    shapes = [None if x is None else tuple(x.shape) for x in (pool.k_scale, pool.v_scale)]
    wanted = [(1, turn), (1, rank)] if scaled else [None, None]
    require(
        shapes == wanted and not pool.dynamic,
        f"scales of keys and latents are {shapes}; needed are static ones, {wanted}",
    )
    tensors = (pool.k, pool.v, pool.k_scale, pool.v_scale)
    require(
        all(x is None or x.is_contiguous() for x in tensors),
        "the cache and its scales must be contiguous",
    )


def _check_queries(q: Tensor, rotated: Tensor, inputs: AttentionInputs) -> None:
    """Raise ValueError where queries and sequences do not fit the cache."""
    rank, turn = inputs.pool.v.shape[3], inputs.pool.k.shape[3]
    tables, lengths, starts = inputs.block_tables, inputs.context_len, inputs.query_start
    require(
        q.dim() == 3 and q.shape[2] == rank and q.stride(2) == 1,
        f"q is {tuple(q.shape)}; needed is [tokens, heads, {rank}] with whole rows",
    )
    require(
        tuple(rotated.shape) == (*q.shape[:2], turn) and rotated.is_contiguous(),
        f"rotated queries are {tuple(rotated.shape)}; needed is contiguous {(*q.shape[:2], turn)}",
    )
    require(
        tables.shape[0] == lengths.shape[0] and tables.is_contiguous() and lengths.is_contiguous(),
        f"{tables.shape[0]} block tables and {lengths.shape[0]} contexts; needed are as many, "
        "contiguous",
    )
    require(
        starts is None or (len(starts) == len(lengths) + 1 and starts.is_contiguous()),
        f"query_start needs {len(lengths) + 1} entries, contiguous",
    )
    require(
        inputs.sliding_window is None and not inputs.changes_logits,
        "attention over latents takes no sliding window, bound of logits, sinks or biases",
    )
