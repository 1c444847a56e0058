"""Causal attention of many new tokens over their sequences' paged cache, new tokens included.

FlashAttention-2 (Dao 2023) over the cache of `kernels.triton.attention.paged_cache`: a program
holds a tile of queries and walks the pages that they see, with a running maximum, sum and result a
row. A tile's rows are the queries of one sequence times the heads that share a KV head,

    row r = query (r // GROUP), head (r % GROUP),

so that a page is read once, and its 8 bits are turned into fp16 once, for all of them. Pages that
the first query of a tile sees whole need no mask; those after the last query, and those before the
window, are not read. Scales are used as in `kernels.triton.attention.decode`.

Which tile a program has is found on the device, in `query_start`: sequence s, with QUERIES a tile,
has the tiles from query_start[s] // QUERIES + s on, enough for any number of queries. So launches
depend on shapes alone and can be captured. Later tiles see more, and start first.

Where few rows would leave most SMs idle, the pages of a tile are cut into at most SPLITS runs, as
in decode, and the last of a tile's programs to finish adds them up: a few tokens after a long
context are read by all SMs.

A sequence with one new token would leave most of a tile's rows idle. `decodes` of them, first in
the batch, go through `decode_attention`, a launch of its own.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import AttentionInputs
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import (
    HIDDEN,
    LOG2_E,
    LOWEST,
    PER_CHANNEL,
    PER_HEAD,
    PER_TOKEN,
    UNLIMITED,
    capped,
    channels_of,
    check_pages,
    check_queries,
    head_size,
    keys_at,
    lift_of,
    load_channels,
    operand_type,
    result,
    scale_kind,
    values_at,
)
from kernels.triton.attention.prefill_runs import leave_run, store_rows
from kernels.triton.common import Workspace, capability, overlap, require, wait
from kernels.triton.tuning import PrefillTile, prefill_rule, prefill_tile
from kernels.triton.versions import run_gluon

LEAST = tl.constexpr(1024)  # tokens of a run


@triton.jit
def sequence_of(tile, query_start, base, begin, end, QUERIES: tl.constexpr):
    """Of sequences begin .. end - 1 the last whose first tile is not after this one."""
    low, high = begin + tile * 0, end + tile * 0
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start + middle).to(tl.int32) - base
        after = start // QUERIES + middle - begin > tile
        low, high = tl.where(after, low, middle), tl.where(after, middle, high)
    return low


@triton.jit
def tile_of(tile, query_start, decodes, S, QUERIES: tl.constexpr):
    """Of a tile of prompts: (sequence, its first row, its new tokens, the tile's first of these).

    The last is not less than the new tokens where there is no such tile.
    """
    base = tl.load(query_start + decodes).to(tl.int32)
    sequence = sequence_of(tile, query_start, base, decodes, S, QUERIES)
    start = tl.load(query_start + sequence).to(tl.int32)
    count = tl.load(query_start + sequence + 1).to(tl.int32) - start
    first = (tile - (start - base) // QUERIES - (sequence - decodes)) * QUERIES
    return sequence, start, count, first


@triton.jit
def with_sinks(
    m, l, acc, x, position, oldest, factor, softcap, slopes, sink_k, sink_v, line,  # noqa: E741
    of_k, of_v, unit, DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) after the tokens at the first SINKS positions, which are not quantized, in fp32.

    Args:
        x: Queries, fp32 [ROWS, WIDE].
        oldest: The first position that each of them sees.
        factor: Of scores, without the scales of K.
        line: Number of the sequence's first page times heads, plus the head.
        of_k, of_v: Channels of `x` and of `acc`.
        unit: What `acc` is in, a number of it for one of V.
    """
    for n in tl.static_range(SINKS):
        at = (line * SINKS + n) * DIM
        k = tl.load(sink_k + at + of_k, mask=of_k < DIM, other=0.0).to(tl.float32)
        v = tl.load(sink_v + at + of_v, mask=of_v < DIM, other=0.0).to(tl.float32) * unit
        s = tl.sum(x * k[None, :], 1) * factor
        if softcap is not None:
            s = capped(s, softcap)
        if slopes is not None:
            s += slopes * (n - position).to(tl.float32)
        s = tl.where((n <= position) & (n >= oldest), s, HIDDEN)
        top = tl.maximum(m, s)
        weights, shrink = tl.exp2(s - top), tl.exp2(m - top)
        l = l * shrink + weights  # noqa: E741
        acc = acc * shrink[:, None] + weights[:, None] * v[None, :]
        m = top
    return m, l, acc


@triton.jit
def walk(
    m, l, acc, x, position, begin, end, factor, window, softcap, slopes,  # noqa: E741
    k_pages, v_pages, k_scale, v_scale, table, head,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, SCALES: tl.constexpr,
    SINKS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) after blocks begin .. end - 1 of TOKENS tokens, a page or a part of one."""
    WIDE: tl.constexpr = x.shape[1]
    CHANGED: tl.constexpr = softcap is not None or slopes is not None  # logits, once scaled
    t = tl.arange(0, TOKENS)
    PARTS: tl.constexpr = 64 // TOKENS
    for b in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(table + b // PARTS).to(tl.int64) * HEADS + head
        at = b % PARTS * TOKENS + t
        k = keys_at(k_pages, page, at, DIM, WIDE)
        v = values_at(v_pages, page, at, DIM, WIDE)
        s = tl.dot(x, tl.trans(k))  # [ROWS, TOKENS]
        if SCALES == PER_TOKEN:
            s *= tl.load(k_scale + page * 64 + at).to(tl.float32)[None, :]
        token = b * TOKENS + t
        if CHANGED:
            s *= factor
        if softcap is not None:
            s = capped(s, softcap)
        if slopes is not None:
            s += slopes[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            seen = seen & (token[None, :] > position[:, None] - window) & (token >= SINKS)[None, :]
            s = tl.where(seen, s, HIDDEN)
        elif SINKS > 0:
            s = tl.where((token >= SINKS)[None, :], s, HIDDEN)
        rest = 1.0 if CHANGED else factor
        top = tl.maximum(m, tl.max(s, 1) * rest)
        weights = tl.exp2(s * rest - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(weights, 1)  # noqa: E741
        m = top
        if SCALES == PER_TOKEN:
            lifted = tl.load(v_scale + page * 64 + at).to(tl.float32)
            lifted *= lift_of(v_pages.dtype.element_ty)
            weights = weights * lifted[None, :]
            if MASKED:  # the scale of a token that nobody wrote may be anything
                weights = tl.where(seen, weights, 0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(x.dtype), tl.trans(v), acc)
    return m, l, acc


@triton.jit(do_not_specialize=["decodes", "S", "window", "width"])
def prefill_kernel(
    q, k_pages, v_pages, tables, query_start, lengths, k_scale, v_scale, out, out_scale, parts,
    arrivals, softmax_scale, decodes, S, window, width, softcap, sinks, alibi, sink_k, sink_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SCALES: tl.constexpr, SINKS: tl.constexpr,
    WINDOWED: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile of queries, split); SCALES and WIDE as for decode."""
    QUERIES: tl.constexpr = ROWS // GROUP
    wait(OVERLAP)
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, start, count, first = tile_of(tile, query_start, decodes, S, QUERIES)
    if first >= count:
        return
    OPERAND: tl.constexpr = operand_type(k_pages.dtype.element_ty)
    LIFT: tl.constexpr = lift_of(v_pages.dtype.element_ty)
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDE)
    query = first + r // GROUP
    real = (query < count) & (r < QUERIES * GROUP)
    cells = ((start + query).to(tl.int64) * HEADS + head) * GROUP + r % GROUP
    of_k = channels_of(d, DIM, WIDE, k_pages.dtype.element_ty)
    of_v = channels_of(d, DIM, WIDE, v_pages.dtype.element_ty)
    asked = real[:, None]
    inside = real[:, None]
    if WIDE != DIM:
        asked = asked & (of_k < DIM)[None, :]
        inside = inside & (of_v < DIM)[None, :]
    x = tl.load(q + cells[:, None] * DIM + of_k[None, :], mask=asked, other=0.0)
    cells = cells[:, None] * DIM + of_v[None, :]
    factor = softmax_scale * LOG2_E
    if softcap is not None:
        factor *= 2.0 / softcap
    asking, plain = x.to(tl.float32), factor
    if SCALES == PER_HEAD:
        factor *= tl.load(k_scale + head)
    if SCALES == PER_CHANNEL:
        own = load_channels(k_scale + head * DIM + of_k, of_k < DIM, WIDE == DIM)
        x = x.to(tl.float32) * own[None, :]
    x = x.to(tl.float32).to(OPERAND)  # [ROWS, WIDE]
    old = tl.load(lengths + sequence).to(tl.int32) - count
    position = old + query
    end = tl.cdiv(old + tl.minimum(first + QUERIES, count), TOKENS)
    m = tl.full([ROWS], LOWEST, tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    if sinks is not None:  # a maximum and a sum of one, of no value
        sink = tl.load(sinks + head * GROUP + r % GROUP) * LOG2_E
        if SPLITS > 1:
            m = tl.where(tl.program_id(2) == 0, sink, m)
            l = tl.where(tl.program_id(2) == 0, 1.0, l)  # noqa: E741
        else:
            m = sink
            l += 1.0  # noqa: E741
    slopes = None
    if alibi is not None:
        slopes = tl.load(alibi + head * GROUP + r % GROUP) * LOG2_E
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    table = tables + sequence * width
    if SINKS > 0:
        unit = LIFT * 1.0
        if SCALES != PER_TOKEN:
            unit = 1.0 / tl.load(v_scale + head)
        oldest = position - window + 1
        if SPLITS > 1:
            oldest = tl.where(tl.program_id(2) == 0, oldest, SINKS)
        line = tl.load(table).to(tl.int64) * HEADS + head
        m, l, acc = with_sinks(  # noqa: E741
            m, l, acc, asking, position, oldest, plain, softcap, slopes, sink_k, sink_v, line, of_k,
            of_v, unit, DIM, SINKS,
        )  # fmt: skip
    if WINDOWED:
        whole = tl.maximum(old + first + 1 - window, 0) // TOKENS  # where the walk begins
    else:
        whole = (old + first + 1) // TOKENS
    begin, runs = 0, 1
    if SPLITS > 1:
        if WINDOWED:
            begin = whole
        share = tl.maximum(tl.cdiv(end - begin, SPLITS), LEAST // TOKENS)
        runs = tl.maximum(tl.cdiv(end - begin, share), 1)
        if tl.program_id(2) >= runs:
            return
        begin += tl.program_id(2) * share
        end = tl.minimum(begin + share, end)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    if not WINDOWED:
        m, l, acc = walk(  # noqa: E741
            m, l, acc, x, position, begin, whole, factor, window, softcap, slopes, k_pages, v_pages,
            k_scale, v_scale, table, head, HEADS, DIM, TOKENS, SCALES, SINKS, False, STAGES,
        )  # fmt: skip
    m, l, acc = walk(  # noqa: E741
        m, l, acc, x, position, whole, end, factor, window, softcap, slopes, k_pages, v_pages,
        k_scale, v_scale, table, head, HEADS, DIM, TOKENS, SCALES, SINKS, True, STAGES,
    )  # fmt: skip
    if SPLITS == 1:
        store_rows(l, acc, v_scale, out, out_scale, head, cells, inside, SCALES, LIFT)
    else:
        last = runs == 1
        if runs > 1:
            item = tile * HEADS + head
            last, l, acc = leave_run(  # noqa: E741
                m, l, acc, parts, arrivals, item, tl.program_id(2), r, d, runs, SPLITS
            )
        if last:
            store_rows(l, acc, v_scale, out, out_scale, head, cells, inside, SCALES, LIFT)


def prefill_attention(
    q: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    decodes: int = 0,
    *,
    tile: PrefillTile | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of the new tokens of S sequences; their K and V are in the cache already.

    Args:
        q: fp32, fp16 or bf16 [T, Hq, D], the sequences' queries one after another, from row 0;
            fastest in the operands' type (fp16 for 8 bits), as it then need not go by registers.
        inputs: With a pool as in `kernels.triton.attention.paged_cache`, finite also where no token
            is yet, and block tables that hold valid numbers throughout. A sequence without queries
            costs nothing; rows from the last entry of `query_start` on are not written.
        workspace: Of the stream that this runs in.
        decodes: How many sequences, first in the batch, have one new token each.
        tile: What a program takes; by default the device's table says.
        out_scale: fp32, one element: the result is quantized with it.
        out_dtype: int8 or e4m3 with `out_scale`, else a float type; by default that of `q`.

    Returns:
        [T, Hq, D].

    Raises:
        ValueError: a shape or type does not fit.
    """
    check_pages(inputs.pool)
    check_queries(q, inputs)
    tokens, sequences, starts = q.shape[0], inputs.context_len.shape[0], inputs.query_start
    require(
        starts is not None and starts.shape == (sequences + 1,) and starts.is_contiguous(),
        f"query_start is {starts is not None and tuple(starts.shape)}; needed is "
        f"[{sequences + 1}], contiguous",
    )
    require(0 <= decodes <= min(sequences, tokens), f"{decodes} of {sequences} sequences decode")
    out = result(q, out=None, out_scale=out_scale, out_dtype=out_dtype)
    if decodes:
        first = replace(
            inputs,
            block_tables=inputs.block_tables[:decodes],
            context_len=inputs.context_len[:decodes],
        )
        decode_attention(q[:decodes], first, workspace, out_scale=out_scale, out=out[:decodes])
    if decodes < min(sequences, tokens):
        _launch(q, inputs, workspace, decodes, tile, out, out_scale)
    return out


def _launch(
    q: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    decodes: int,
    tile: PrefillTile | None,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """Attention of the sequences that come after those that decode."""
    (tokens, q_heads, dim), pool, kind = q.shape, inputs.pool, scale_kind(inputs.pool)
    heads, sequences, wide = pool.k.shape[1], len(inputs.context_len), triton.next_power_of_2(dim)
    if dim > 128 and kind:
        q = q.half()  # converted in the kernel, it would be held in registers that there are not
    group, window = q_heads // heads, inputs.sliding_window or UNLIMITED
    pages = min(inputs.block_tables.shape[1], window // 64)
    tile = tile or prefill_tile(q.device, (tokens - decodes) * q_heads, wide, kind, pages)
    if tile.stages == 0 and _fits_hopper(inputs, group, kind):

        def launch() -> None:
            from kernels.triton.attention import prefill_hopper

            prefill_hopper.launch(q, inputs, decodes, window, out, out_scale)

        if run_gluon("prefill attention", launch):
            return
    if tile.stages == 0:
        tile = prefill_rule(math.inf, wide, kind, capability())
    queries = tile.rows // group
    require(queries > 0, f"{group} query heads a KV head; the most are {tile.rows}")
    tiles = (tokens - decodes) // queries + sequences - decodes
    room = workspace.parts.numel() // (heads * tiles * tile.rows * (wide + 2))
    splits = max(1, min(tile.splits, room)) if heads * tiles <= workspace.arrivals.numel() else 1
    prefill_kernel[(heads, tiles, splits)](
        q, pool.k, pool.v, inputs.block_tables, inputs.query_start, inputs.context_len,
        pool.k_scale, pool.v_scale, out, out_scale, workspace.parts if splits > 1 else None,
        workspace.arrivals if splits > 1 else None, inputs.softmax_scale, decodes, sequences,
        window, inputs.block_tables.shape[1], inputs.softcap, inputs.sinks, inputs.alibi,
        pool.sink_k, pool.sink_v, HEADS=heads, GROUP=group, DIM=dim, WIDE=wide, ROWS=tile.rows,
        TOKENS=tile.tokens, SCALES=kind, SINKS=pool.sink_tokens,
        WINDOWED=inputs.sliding_window is not None, STAGES=tile.stages, SPLITS=splits,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        **overlap(early=False),
    )  # fmt: skip


def _fits_hopper(inputs: AttentionInputs, group: int, kind: int) -> bool:
    """Whether `prefill_hopper` is for this cache; `kind` is the number of dimensions of its scales.

    It is not for heads of another size than 128, more than 128 queries a KV head, what changes
    logits, 16 bits, where there is nothing to convert, scales of channels, nor for other GPUs than
    Hopper, nor is it interpreted.
    """
    k = inputs.pool.k
    hopper = k.device.type != "cuda" or torch.cuda.get_device_capability(k.device)[0] == 9
    fits = head_size(inputs.pool) == 128 and group <= 128 and kind in (1, 3)
    return fits and not inputs.changes_logits and hopper and not triton.knobs.runtime.interpret
