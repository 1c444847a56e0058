"""Decode attention: one query a sequence over its paged int8 or fp8 cache.

For a query with scores s_t over the visible positions, out = sum_t e^(s_t - m) v_t / sum_t
e^(s_t - m), m the running maximum (Milakov and Gimelshein 2018), powers of 2 in place of e. Layout:

    k_pages [pages, Hkv, 64, D]    v_pages [pages, Hkv, D, 64]    int8 or e4m3

V lies token by token, so that both products read whole lines: S^T = K q^T and O^T = V^T P^T, where
the small side, padded to 8, is the queries that share a KV head. Both are fp16 products, exact in
K and V. The scale of K goes into the scores (that of a channel into q), the scale of V into the
weights (of a token, times 2^8, which keeps them out of fp16's subnormal numbers) or the result.

A sequence's pages are cut into SPLITS equal runs, on the device, where lengths are; the last
program of a (sequence, head) to finish combines the runs in order, so a row has the same bits in
any batch that is cut alike. Where nothing was read, as for a row of length 0, the result is 0.
`kernels.triton.attention_gluon` does the same faster for D = 128.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Workspace, eight_bits_to_fp16, require
from kernels.triton.tuning import Cut, attention_cut

PAGE = 64
UNLIMITED = 1 << 30
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
LIFT = tl.constexpr(256.0)
PER_HEAD, PER_CHANNEL, PER_TOKEN = (tl.constexpr(dims) for dims in (1, 2, 3))


@triton.jit(do_not_specialize=["window", "width"])
def decode_kernel(
    q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, parts, arrivals,
    softmax_scale, window, width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, sequence); SCALES is the number of dimensions of k_scale."""
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    oldest = tl.maximum(length - window, 0)
    pages = tl.cdiv(length, 64)
    share = tl.cdiv(pages - oldest // 64, SPLITS)
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
    qt = qt.to(tl.float16)  # [DIM, PADDED]
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    acc = tl.zeros([DIM, PADDED], tl.float32)
    for p in tl.range(first, tl.minimum(first + share, pages), num_stages=STAGES):
        page = tl.load(tables + sequence * width + p).to(tl.int64) * HEADS + head
        k = tl.load(k_pages + page * (64 * DIM) + t[:, None] * DIM + d[None, :])
        v = tl.load(v_pages + page * (64 * DIM) + d[:, None] * 64 + t[None, :])
        s = tl.dot(eight_bits_to_fp16(k), qt) * factor  # [64, PADDED]
        if SCALES == PER_TOKEN:
            s *= tl.load(k_scale + page * 64 + t).to(tl.float32)[:, None]
        seen = (p * 64 + t < length) & (p * 64 + t >= oldest)
        s = tl.where(seen[:, None], s, LOWEST)
        top = tl.maximum(m, tl.max(s, 0))
        weights = tl.exp2(s - top[None, :])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(weights, 0)  # noqa: E741
        m = top
        if SCALES == PER_TOKEN:
            lifted = tl.load(v_scale + page * 64 + t).to(tl.float32) * LIFT
            weights = tl.where(seen[:, None], weights * lifted[:, None], 0.0)
        acc = acc * shrink[None, :]
        acc = tl.dot(eight_bits_to_fp16(v), weights.to(tl.float16), acc)
    last = True
    if SPLITS > 1:
        item = sequence * HEADS + head
        run: tl.constexpr = PADDED * (DIM + 2)  # a split's acc, m and l
        place = parts + (item * SPLITS + split).to(tl.int64) * run
        tl.store(place + h[None, :] * DIM + d[:, None], acc)
        tl.store(place + PADDED * DIM + h, m)
        tl.store(place + PADDED * DIM + PADDED + h, l)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + item, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.debug_barrier()
            place = parts + (item * SPLITS).to(tl.int64) * run
            m, l, acc = combine(place, h, d, PADDED, DIM, SPLITS)  # noqa: E741
            tl.store(arrivals + item, 0)
    if last:
        y = tl.where(l > 0, 1.0 / l, 0.0)[None, :] * acc
        y *= 1.0 / LIFT if SCALES == PER_TOKEN else tl.load(v_scale + head)
        tl.store(out + rows[None, :] + d[:, None], y.to(out.dtype.element_ty), mask=real)


@triton.jit
def combine(place, h, d, PADDED: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """(m, l, acc) over all splits of one (sequence, head), added in order."""
    m = tl.full([PADDED], LOWEST, tl.float32)
    l = tl.zeros([PADDED], tl.float32)  # noqa: E741
    acc = tl.zeros([DIM, PADDED], tl.float32)
    for i in range(SPLITS):
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


def check_cache(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lengths: Tensor,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError where the arguments of `decode_attention` do not fit each other."""
    pages, heads, page, dim = k_pages.shape
    sequences = q.shape[0]
    require(page == PAGE, f"pages hold {page} tokens; needed are {PAGE}")
    require(
        k_pages.dtype == v_pages.dtype and k_pages.dtype in (torch.int8, torch.float8_e4m3fn),
        f"cache is {k_pages.dtype} and {v_pages.dtype}; needed is int8 or float8_e4m3fn",
    )
    require(
        tuple(v_pages.shape) == (pages, heads, dim, page),
        f"v_pages is {tuple(v_pages.shape)}; needed is {(pages, heads, dim, page)}, tokens last",
    )
    require(
        q.dim() == 3 and q.shape[2] == dim and q.shape[1] % heads == 0 and q.is_contiguous(),
        f"q is {tuple(q.shape)}; needed is contiguous [S, n * {heads}, {dim}]",
    )
    require(
        dim in (16, 32, 64, 128, 256), f"head size {dim} is not supported: 16, 32, 64, 128, 256"
    )
    require(
        tables.shape[0] == sequences == lengths.shape[0],
        f"{tables.shape[0]} block tables and {lengths.shape[0]} lengths for {sequences} queries",
    )
    of_k = {1: (heads,), 2: (heads, dim), 3: (pages, heads, page)}
    of_v = {1: (heads,), 2: (heads,), 3: (pages, heads, page)}
    kind = k_scale.dim()
    require(
        tuple(k_scale.shape) == of_k.get(kind) and tuple(v_scale.shape) == of_v[kind],
        f"scales are {tuple(k_scale.shape)} and {tuple(v_scale.shape)}; needed are [{heads}], or "
        f"[{heads}, {dim}] for K, or both [{pages}, {heads}, {page}]",
    )
    require(
        all(x.is_contiguous() for x in (k_pages, v_pages, tables, lengths, k_scale, v_scale)),
        "the cache, its scales, the tables and the lengths must be contiguous",
    )


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    softmax_scale: float,
    workspace: Workspace,
    sliding_window: int | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """Attention of one new token of each sequence; its K and V are in the cache already.

    Args:
        q: fp32, fp16 or bf16 [S, Hq, D].
        k_pages: int8 or e4m3 [pages, Hkv, 64, D]; finite also where no token is yet.
        v_pages: [pages, Hkv, D, 64], likewise.
        tables: int32 or int64 [S, W], pages of each sequence in order, valid numbers throughout.
        lengths: int32 or int64 [S] on the device, tokens in the cache, this one included.
        k_scale: fp32 [Hkv] or [Hkv, D], or fp32 or fp16 [pages, Hkv, 64].
        v_scale: fp32 [Hkv], or [pages, Hkv, 64] in the type of `k_scale`.
        softmax_scale: Factor of q k^T.
        workspace: Of the stream that this runs in.
        sliding_window: Positions seen, or None for all.
        cut: Splits of a sequence; by default the device's table says.

    Returns:
        [S, Hq, D] in the type of `q`.

    Raises:
        ValueError: a shape or type does not fit, or the workspace is too small.
    """
    check_cache(q, k_pages, v_pages, tables, lengths, k_scale, v_scale)
    (sequences, q_heads, dim), heads = q.shape, k_pages.shape[1]
    out = torch.empty_like(q)
    if sequences == 0:
        return out
    per_token = k_scale.dim() == 3
    cut = cut or attention_cut(q.device, sequences, heads, tables.shape[1], per_token)
    padded = max(8, triton.next_power_of_2(q_heads // heads))
    items = sequences * heads
    workspace.check(items * cut.splits * padded * (dim + 2), items)
    decode_kernel[(cut.splits, heads, sequences)](
        q, k_pages, v_pages, tables, lengths, k_scale, v_scale, out, workspace.parts,
        workspace.arrivals, softmax_scale, sliding_window or UNLIMITED, tables.shape[1],
        HEADS=heads, GROUP=q_heads // heads, PADDED=padded, DIM=dim, SPLITS=cut.splits,
        SCALES=k_scale.dim(), STAGES=cut.stages or 3, num_warps=4, num_stages=cut.stages or 3,
    )  # fmt: skip
    return out
