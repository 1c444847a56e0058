"""Decode attention: one query a sequence over its paged cache.

For a query with scores s_t over the visible positions, out = sum_t e^(s_t - m) v_t / sum_t
e^(s_t - m), m the running maximum (Milakov and Gimelshein 2018), powers of 2 in place of e. The
cache is that of `kernels.triton.attention.paged_cache`. The products are S^T = K q^T and O^T = V^T
P^T, where the small side, padded to 8, is the queries that share a KV head. The scale of K goes
into the scores (that of a channel into q), the scale of V into the weights (of a token, times 2^8,
which keeps them out of fp16's subnormal numbers) or the result.

A sequence's pages are cut into at most SPLITS equal runs, on the device, where lengths are;
programs without a run end at once. The last program of a (sequence, head) to finish combines the
runs in order, so a row has the same bits in any batch that is cut alike. Where nothing was read, as
for a row of length 0, the result is 0. An 8-bit result is quantized where it is combined.
`kernels.triton.attention.decode_hopper` does the same faster for 8 bits and D = 128.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.paged_cache import (
    HIDDEN,
    LIFT,
    LOG2_E,
    LOWEST,
    PER_CHANNEL,
    PER_HEAD,
    PER_TOKEN,
    UNLIMITED,
    as_operand,
    check_pages,
    check_queries,
    finish,
    operand_type,
    result,
    scale_kind,
)
from kernels.triton.common import Workspace, overlap, wait
from kernels.triton.tuning import Cut, attention_cut
from kernels.triton.versions import run_gluon


@triton.jit(do_not_specialize=["window", "width"])
def decode_kernel(
    q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, out_scale, parts, arrivals,
    softmax_scale, window, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
    SETTLED: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); SCALES is the number of dimensions of k_scale, or 0."""
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not SETTLED:
        wait(OVERLAP)
    length = tl.load(lengths + sequence).to(tl.int32)
    oldest = tl.maximum(length - window, 0)
    pages = tl.cdiv(length, 64)
    share = tl.maximum(tl.cdiv(pages - oldest // 64, SPLITS), 1)
    runs = tl.maximum(tl.cdiv(pages - oldest // 64, share), 1)
    if split >= runs:
        return
    if SETTLED:
        wait(OVERLAP)
    OPERAND: tl.constexpr = operand_type(k_pages.dtype.element_ty)
    first = oldest // 64 + split * share
    d, t, h = tl.arange(0, DIM), tl.arange(0, 64), tl.arange(0, PADDED)
    rows = ((sequence * HEADS + head) * GROUP + h) * DIM
    real = (h < GROUP)[None, :]
    qt = tl.load(q + rows[None, :] + d[:, None], mask=real, other=0.0).to(tl.float32)
    factor = softmax_scale * LOG2_E
    if SCALES == PER_HEAD:
        factor *= tl.load(k_scale + head)
    if SCALES == PER_CHANNEL:
        qt *= tl.load(k_scale + head * DIM + d)[:, None]
    qt = qt.to(OPERAND)  # [DIM, PADDED]
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    acc = tl.zeros([DIM, PADDED], tl.float32)
    for p in tl.range(first, tl.minimum(first + share, pages), num_stages=STAGES):
        page = tl.load(tables + sequence * width + p).to(tl.int64) * HEADS + head
        k = tl.load(k_pages + page * (64 * DIM) + t[:, None] * DIM + d[None, :])
        v = tl.load(v_pages + page * (64 * DIM) + d[:, None] * 64 + t[None, :])
        s = tl.dot(as_operand(k), qt) * factor  # [64, PADDED]
        if SCALES == PER_TOKEN:
            s *= tl.load(k_scale + page * 64 + t).to(tl.float32)[:, None]
        seen = (p * 64 + t < length) & (p * 64 + t >= oldest)
        s = tl.where(seen[:, None], s, HIDDEN)
        top = tl.maximum(m, tl.max(s, 0))
        weights = tl.exp2(s - top[None, :])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(weights, 0)  # noqa: E741
        m = top
        if SCALES == PER_TOKEN:
            lifted = tl.load(v_scale + page * 64 + t).to(tl.float32) * LIFT
            weights = tl.where(seen[:, None], weights * lifted[:, None], 0.0)
        acc = acc * shrink[None, :]
        acc = tl.dot(as_operand(v), weights.to(OPERAND), acc)
    last = runs == 1
    if SPLITS > 1:  # noqa: SIM102  (known when compiled; the other is not)
        if runs > 1:
            item = sequence * HEADS + head
            run: tl.constexpr = PADDED * (DIM + 2)  # a split's acc, m and l
            place = parts + (item * SPLITS + split).to(tl.int64) * run
            tl.store(place + h[None, :] * DIM + d[:, None], acc)
            tl.store(place + PADDED * DIM + h, m)
            tl.store(place + PADDED * DIM + PADDED + h, l)
            tl.debug_barrier()
            last = tl.atomic_add(arrivals + item, 1, sem="acq_rel") == runs - 1
            if last:
                tl.debug_barrier()
                place = parts + (item * SPLITS).to(tl.int64) * run
                m, l, acc = combine(place, h, d, runs, PADDED, DIM)  # noqa: E741
                tl.store(arrivals + item, 0)
    if last:
        y = tl.where(l > 0, 1.0 / l, 0.0)[None, :] * acc
        if SCALES == PER_TOKEN:
            y *= 1.0 / LIFT
        elif SCALES > 0:
            y *= tl.load(v_scale + head)
        tl.store(out + rows[None, :] + d[:, None], finish(y, out, out_scale), mask=real)


@triton.jit
def combine(place, h, d, runs, PADDED: tl.constexpr, DIM: tl.constexpr):
    """(m, l, acc) over all runs of one (sequence, head), added in order."""
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    acc = tl.zeros([DIM, PADDED], tl.float32)
    for i in range(runs):
        own = place + i * PADDED * (DIM + 2)
        part_m = tl.load(own + PADDED * DIM + h, cache_modifier=".cg")
        part_l = tl.load(own + PADDED * DIM + PADDED + h, cache_modifier=".cg")
        part = tl.load(own + h[None, :] * DIM + d[:, None], cache_modifier=".cg")
        top = tl.maximum(m, part_m)
        old, new = tl.exp2(m - top), tl.exp2(part_m - top)
        l = l * old + part_l * new  # noqa: E741
        acc = acc * old[None, :] + part * new[None, :]
        m = top
    return m, l, acc


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float,
    workspace: Workspace,
    sliding_window: int | None = None,
    cut: Cut | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    settled: bool = False,
) -> Tensor:
    """Attention of one new token of each sequence; its K and V are in the cache already.

    Args:
        q: fp32, fp16 or bf16 [S, Hq, D].
        k_pages: int8, e4m3, bf16 or fp16 [pages, Hkv, 64, D]; finite also where no token is yet.
        v_pages: [pages, Hkv, D, 64], likewise.
        tables: int32 or int64 [S, W], pages of each sequence in order, valid numbers throughout.
        lengths: int32 or int64 [S] on the device, tokens in the cache, this one included; 0 for a
            row that stands for nothing.
        k_scale: fp32 [Hkv] or [Hkv, D], or fp32 or fp16 [pages, Hkv, 64]; None for 16 bits.
        v_scale: fp32 [Hkv], or [pages, Hkv, 64] in the type of `k_scale`; None for 16 bits.
        softmax_scale: Factor of q k^T.
        workspace: Of the stream that this runs in.
        sliding_window: Positions seen, or None for all.
        cut: Splits of a sequence; by default the device's table says.
        out_scale: fp32, one element: the result is quantized with it.
        out_dtype: int8 or e4m3 with `out_scale`, else a float type; by default that of `q`.
        out: Where the result goes; by default a new tensor.
        settled: Whether `tables` and `lengths` were there before the kernel ahead of this started:
            they are then read while it runs.

    Returns:
        [S, Hq, D], zeros where a length is 0.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    check_pages(k_pages, v_pages, k_scale, v_scale)
    check_queries(q, k_pages, tables, lengths)
    (sequences, q_heads, dim), heads = q.shape, k_pages.shape[1]
    if tables.shape[0] != sequences:
        raise ValueError(f"{tables.shape[0]} block tables for {sequences} queries")
    out = result(q, out, out_scale, out_dtype)
    if sequences == 0:
        return out
    group, kind = q_heads // heads, scale_kind(k_scale)
    cut = cut or attention_cut(q.device, sequences, heads, tables.shape[1], kind)
    items, pointers = sequences * heads, (q, k_pages, v_pages, tables, lengths, k_scale, v_scale)
    padded = max(8, triton.next_power_of_2(group))
    if cut.splits > 1:
        workspace.check(items * cut.splits * padded * (dim + 2), items)
    if cut.stages == 0 and _fits_stated_layouts(k_pages, group, kind, sliding_window):

        def launch() -> None:
            from kernels.triton.attention import decode_hopper

            decode_hopper.launch(*pointers, out, out_scale, workspace, softmax_scale, cut, settled)

        if run_gluon("decode attention", launch):
            return out
    stages = cut.stages or 3
    decode_kernel[(cut.splits, heads, sequences)](
        *pointers, out, out_scale, workspace.parts, workspace.arrivals, softmax_scale,
        sliding_window or UNLIMITED, tables.shape[1], HEADS=heads, GROUP=group, PADDED=padded,
        DIM=dim, SPLITS=cut.splits, SCALES=kind, STAGES=stages, num_warps=4, num_stages=stages,
        SETTLED=settled, enable_fp_fusion=True, **overlap(early=False),
    )  # fmt: skip
    return out


def _fits_stated_layouts(
    k_pages: Tensor, group: int, kind: int, sliding_window: int | None
) -> bool:
    """Whether `decode_hopper` is for this cache; `kind` is the number of dimensions of its scales.

    It is not for heads of another size than 128, more than 8 queries a KV head, a sliding window,
    16 bits or scales of channels, nor is it interpreted.
    """
    fits = k_pages.shape[3] == 128 and group <= 8 and sliding_window is None and kind in (1, 3)
    return fits and not triton.knobs.runtime.interpret
