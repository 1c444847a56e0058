"""Decode attention: one query a sequence over its paged cache.

For a query with scores s_t over the visible positions, out = sum_t e^(s_t - m) v_t / sum_t
e^(s_t - m), m the running maximum (Milakov and Gimelshein 2018), powers of 2 in place of e. The
cache is that of `kernels.triton.attention.paged_cache`. The products are S^T = K q^T and O^T = V^T
P^T, where the small side, padded to 8, is the queries that share a KV head. The scale of K goes
into the scores (that of a channel into q), the scale of V into the weights (of a token, times 2^8,
which keeps them out of fp16's subnormal numbers) or the result. A sink is what the first run starts
with: a maximum and a sum of one, of no value. Sink tokens, whose K and V are floats beside the
pages (`KVPool.sink_k`), are what it ends with: they are on their way while it walks.

A sequence's pages are cut into at most SPLITS equal runs, on the device, where lengths are;
programs without a run end at once. The last program of a (sequence, head) to finish combines the
runs in order, so a row has the same bits in any batch that is cut alike. Where nothing was read, as
for a row of length 0, the result is 0. An 8-bit result is quantized where it is combined.
`kernels.triton.attention.decode_hopper` does the same faster for 8 and 4 bits and D = 128.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import AttentionInputs
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
    finish,
    head_size,
    keys_at,
    lift_of,
    load_channels,
    operand_type,
    result,
    scale_kind,
    values_at,
)
from kernels.triton.common import Workspace, overlap, require, wait
from kernels.triton.tuning import KVSplit, kv_split
from kernels.triton.versions import run_gluon


@triton.constexpr_function
def power_of_two(count):
    """The next one, of a number that is known when the kernel is compiled."""
    return triton.next_power_of_2(count)


@triton.jit(do_not_specialize=["window", "width"])
def decode_kernel(
    q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, out_scale, parts, arrivals,
    softmax_scale, window, width, softcap, sinks, alibi, sink_k, sink_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, SCALES: tl.constexpr,
    SINKS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, METADATA_READY: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); SCALES is the number of dimensions of k_scale, or 0.

    WIDE is DIM rounded up to a power of two.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not METADATA_READY:
        wait(OVERLAP)
    length = tl.load(lengths + sequence).to(tl.int32)
    oldest = tl.maximum(length - window, 0)
    pages = tl.cdiv(length, 64)
    share = tl.maximum(tl.cdiv(pages - oldest // 64, SPLITS), LEAST)
    runs = tl.maximum(tl.cdiv(pages - oldest // 64, share), 1)
    if split >= runs:
        return
    if METADATA_READY:
        wait(OVERLAP)
    OPERAND: tl.constexpr = operand_type(k_pages.dtype.element_ty)
    first = oldest // 64 + split * share
    d, t, h = tl.arange(0, WIDE), tl.arange(0, 64), tl.arange(0, PADDED)
    rows = ((sequence * HEADS + head) * GROUP + h) * DIM
    real = (h < GROUP)[None, :]
    of_k = channels_of(d, DIM, WIDE, k_pages.dtype.element_ty)
    of_v = channels_of(d, DIM, WIDE, v_pages.dtype.element_ty)
    asked, inside = real, real
    if WIDE != DIM:
        asked, inside = real & (of_k < DIM)[:, None], real & (of_v < DIM)[:, None]
    qt = tl.load(q + rows[None, :] + of_k[:, None], mask=asked, other=0.0).to(tl.float32)
    factor = softmax_scale * LOG2_E
    if softcap is not None:
        factor *= 2.0 / softcap
    asking, plain = qt, factor
    if SCALES == PER_HEAD:
        factor *= tl.load(k_scale + head)
    if SCALES == PER_CHANNEL:
        qt *= load_channels(k_scale + head * DIM + of_k, of_k < DIM, WIDE == DIM)[:, None]
    qt = qt.to(OPERAND)  # [WIDE, PADDED]
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + h, mask=h < GROUP, other=0.0) * LOG2_E
        m = tl.where(split == 0, sink, m)
        l = tl.where(split == 0, 1.0, l)  # noqa: E741
    slopes = None
    if alibi is not None:
        slopes = tl.load(alibi + head * GROUP + h, mask=h < GROUP, other=0.0) * LOG2_E
    acc = tl.zeros([WIDE, PADDED], tl.float32)
    if SINKS > 0:
        line = tl.load(tables + sequence * width).to(tl.int64) * HEADS + head
        own_k = sinks_at(sink_k, line, of_k, split == 0, DIM, SINKS)
        own_v = sinks_at(sink_v, line, of_v, split == 0, DIM, SINKS)
        first_seen = oldest
        oldest = tl.maximum(oldest, SINKS)
    for p in tl.range(first, tl.minimum(first + share, pages), num_stages=STAGES):
        page = tl.load(tables + sequence * width + p).to(tl.int64) * HEADS + head
        m, l, acc = attend(  # noqa: E741
            m, l, acc, qt, factor, softcap, slopes, page, p * 64, t, oldest, length, k_pages,
            v_pages, k_scale, v_scale, DIM, SCALES,
        )  # fmt: skip
    if SINKS > 0:  # noqa: SIM102  (known when compiled; the other is not)
        if split == 0:
            unit = lift_of(v_pages.dtype.element_ty)
            if SCALES != PER_TOKEN:
                unit = 1.0 / tl.load(v_scale + head)
            m, l, acc = with_sinks(  # noqa: E741
                m, l, acc, asking, own_k, own_v, length - 1, first_seen, plain, softcap, slopes,
                unit, SINKS,
            )  # fmt: skip
    last = runs == 1
    if SPLITS > 1:  # noqa: SIM102  (known when compiled; the other is not)
        if runs > 1:
            item = sequence * HEADS + head
            last, l, acc = sum_runs(  # noqa: E741
                m, l, acc, parts, arrivals, item, split, h, d, runs, SPLITS, PADDED, WIDE
            )
    if last:
        y = tl.where(l > 0, 1.0 / l, 0.0)[None, :] * acc
        if SCALES == PER_TOKEN:
            y *= 1.0 / lift_of(v_pages.dtype.element_ty)
        elif SCALES > 0:
            y *= tl.load(v_scale + head)
        tl.store(out + rows[None, :] + of_v[:, None], finish(y, out, out_scale), mask=inside)


@triton.jit
def attend(
    m, l, acc, qt, factor, softcap, slopes, page, start, t, oldest, length,  # noqa: E741
    k_pages, v_pages, k_scale, v_scale,
    DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) after the page from token `start` on; oldest .. length - 1 are seen.

    `t` are the tokens of a page, `page` is its number times heads.
    """
    WIDE: tl.constexpr = acc.shape[0]
    k = keys_at(k_pages, page, t, DIM, WIDE)
    v = values_at(v_pages, page, t, DIM, WIDE)
    s = tl.dot(k, qt) * factor  # [64, PADDED]
    if SCALES == PER_TOKEN:
        s *= tl.load(k_scale + page * 64 + t).to(tl.float32)[:, None]
    if softcap is not None:
        s = capped(s, softcap)
    if slopes is not None:
        s += slopes[None, :] * (start + t - length + 1).to(tl.float32)[:, None]
    seen = (start + t < length) & (start + t >= oldest)
    s = tl.where(seen[:, None], s, HIDDEN)
    top = tl.maximum(m, tl.max(s, 0))
    weights = tl.exp2(s - top[None, :])
    shrink = tl.exp2(m - top)
    l = l * shrink + tl.sum(weights, 0)  # noqa: E741
    if SCALES == PER_TOKEN:
        lifted = tl.load(v_scale + page * 64 + t).to(tl.float32)
        lifted *= lift_of(v_pages.dtype.element_ty)
        weights = tl.where(seen[:, None], weights * lifted[:, None], 0.0)
    acc = acc * shrink[None, :]
    return top, l, tl.dot(v, weights.to(qt.dtype), acc)


@triton.jit
def sinks_at(sink, line, of, asked, DIM: tl.constexpr, SINKS: tl.constexpr):
    """K or V of the tokens at the first SINKS positions, [SINKS rounded up, WIDE], as stored.

    Args:
        line: Number of the sequence's first page times heads, plus the head.
        of: Channels of the tile.
        asked: Whether they are read; there are zeros else.
    """
    n = tl.arange(0, power_of_two(SINKS))
    places = (line * SINKS + n)[:, None] * DIM + of[None, :]
    return tl.load(sink + places, mask=(n < SINKS)[:, None] & (of < DIM) & asked, other=0.0)


@triton.jit
def with_sinks(
    m, l, acc, x, k, v, position, oldest, factor, softcap, slopes, unit,  # noqa: E741
    SINKS: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) after the tokens at the first SINKS positions, which are not quantized, in fp32.

    Args:
        x: Queries, fp32 [WIDE, PADDED].
        k, v: What `sinks_at` gives.
        position: Where the queries stand.
        oldest: The first position that they see.
        factor: Of scores, without the scales of K.
        unit: What `acc` is in, a number of it for one of V.
    """
    at = tl.arange(0, k.shape[0])[:, None]
    s = tl.sum(k.to(tl.float32)[:, :, None] * x[None, :, :], 1) * factor
    if softcap is not None:
        s = capped(s, softcap)
    if slopes is not None:
        s += slopes[None, :] * (at - position).to(tl.float32)
    s = tl.where((at < SINKS) & (at <= position) & (at >= oldest), s, HIDDEN)
    top = tl.maximum(m, tl.max(s, 0))
    weights, shrink = tl.exp2(s - top[None, :]), tl.exp2(m - top)
    l = l * shrink + tl.sum(weights, 0)  # noqa: E741
    own = tl.sum(v.to(tl.float32)[:, :, None] * (weights * unit)[:, None, :], 0)
    return top, l, acc * shrink[None, :] + own


@triton.jit
def sum_runs(
    m, l, acc, parts, arrivals, item, split, h, d, runs,  # noqa: E741
    SPLITS: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Leave a run's sums; the last of its (sequence, head) to arrive gets those of all runs.

    Returns:
        (whether the caller is last, l, acc), the sums only if it is.
    """
    run: tl.constexpr = PADDED * (WIDE + 2)  # a run's acc, m and l
    place = parts + (item * SPLITS + split).to(tl.int64) * run
    tl.store(place + h[None, :] * WIDE + d[:, None], acc)
    tl.store(place + PADDED * WIDE + h, m)
    tl.store(place + PADDED * WIDE + PADDED + h, l)
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + item, 1, sem="acq_rel") == runs - 1
    if last:
        tl.debug_barrier()
        place = parts + (item * SPLITS).to(tl.int64) * run
        m, l, acc = combine(place, h, d, runs, PADDED, WIDE)  # noqa: E741
        tl.store(arrivals + item, 0)
    return last, l, acc


@triton.jit
def combine(place, h, d, runs, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """(m, l, acc) over all runs of one (sequence, head), added in order, several read at once."""
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    acc = tl.zeros([WIDE, PADDED], tl.float32)
    AT_ONCE: tl.constexpr = 8 if WIDE * PADDED <= 2048 else 4 if WIDE * PADDED <= 4096 else 1
    for first in range(0, runs, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            own, there = place + (first + j) * PADDED * (WIDE + 2), first + j < runs
            part_m = tl.load(own + PADDED * WIDE + h, there, LOWEST, cache_modifier=".cg")
            part_l = tl.load(own + PADDED * WIDE + PADDED + h, there, 0.0, cache_modifier=".cg")
            cells = own + h[None, :] * WIDE + d[:, None]
            part = tl.load(cells, there, 0.0, cache_modifier=".cg")
            top = tl.maximum(m, part_m)
            old, new = tl.exp2(m - top), tl.exp2(part_m - top)
            l = l * old + part_l * new  # noqa: E741
            acc = acc * old[None, :] + part * new[None, :]
            m = top
    return m, l, acc


def decode_attention(
    q: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    *,
    split: KVSplit | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    metadata_ready: bool = False,
) -> Tensor:
    """Attention of one new token of each sequence; its K and V are in the cache already.

    Args:
        q: fp32, fp16 or bf16 [S, Hq, D].
        inputs: With a pool as in `kernels.triton.attention.paged_cache`, finite also where no token
            is yet; block tables that hold valid numbers throughout; a context of 0 for a row that
            stands for nothing; `query_start` is not read.
        workspace: Of the stream that this runs in.
        split: How a sequence is split; by default the device's table says.
        out_scale: fp32, one element: the result is quantized with it.
        out_dtype: int8 or e4m3 with `out_scale`, else a float type; by default that of `q`.
        out: Where the result goes; by default a new tensor.
        metadata_ready: Whether block tables and contexts were written before the kernel ahead of
            this started: they are then read while it runs.

    Returns:
        [S, Hq, D], zeros where a context is 0.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    check_pages(inputs.pool)
    check_queries(q, inputs)
    tables = inputs.block_tables.shape[0]
    require(tables == len(q), f"{tables} block tables for {len(q)} queries")
    out = result(q, out, out_scale, out_dtype)
    if len(q):
        _launch(q, inputs, workspace, split, out, out_scale, metadata_ready)
    return out


def _launch(
    q: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    split: KVSplit | None,
    out: Tensor,
    out_scale: Tensor | None,
    metadata_ready: bool,
) -> None:
    """Run the kernel that is for this cache on what `decode_attention` has checked."""
    (sequences, q_heads, dim), pool = q.shape, inputs.pool
    heads, width, kind = pool.k.shape[1], inputs.block_tables.shape[1], scale_kind(pool)
    window = inputs.sliding_window or UNLIMITED
    pages = min(width, window // 64 + 2)
    packed = pool.v.dtype == torch.uint8
    split = split or kv_split(q.device, sequences, heads, pages, kind, dim, packed)
    group, items = q_heads // heads, sequences * heads
    padded, wide = max(8, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    if split.splits > 1:
        workspace.check(items * split.splits * padded * (wide + 2), items)
    if split.stages == 0 and _fits_stated_layouts(inputs, group, kind):

        def launch() -> None:
            from kernels.triton.attention import decode_hopper

            decode_hopper.launch(q, inputs, out, out_scale, workspace, split, metadata_ready)

        if run_gluon("decode attention", launch):
            return
    stages = split.stages or (3 if wide <= 256 else 1)
    decode_kernel[(split.programs(pages), heads, sequences)](
        q, pool.k, pool.v, inputs.block_tables, inputs.context_len, pool.k_scale, pool.v_scale,
        out, out_scale, workspace.parts, workspace.arrivals, inputs.softmax_scale, window, width,
        inputs.softcap, inputs.sinks, inputs.alibi, pool.sink_k, pool.sink_v, HEADS=heads,
        GROUP=group, PADDED=padded, DIM=dim, WIDE=wide, SPLITS=split.splits, LEAST=split.least,
        SCALES=kind, SINKS=pool.sink_tokens, STAGES=stages,
        num_warps=8 if wide > 256 else 4, num_stages=stages, METADATA_READY=metadata_ready,
        enable_fp_fusion=True, **overlap(early=False),
    )  # fmt: skip


def _fits_stated_layouts(inputs: AttentionInputs, group: int, kind: int) -> bool:
    """Whether `decode_hopper` is for this cache; `kind` is the number of dimensions of its scales.

    It is not for heads of another size than 128, more than 8 queries a KV head, a sliding window,
    what changes logits, 16 bits, scales of channels, or sink tokens beside int4 values of static
    scales, nor is it interpreted.
    """
    pool = inputs.pool
    plain = inputs.sliding_window is not None or triton.knobs.runtime.interpret
    plain = plain or (pool.sink_k is not None and pool.v.dtype == torch.uint8 and kind == 1)
    return (
        not (plain or inputs.changes_logits)
        and head_size(inputs.pool) == 128
        and group <= 8
        and kind in (1, 3)
    )
