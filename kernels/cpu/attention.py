"""Attention over the paged cache on the CPU, of torch's batched fp32 matrix products.

The cache's integers are multiplied as they are: the scale of K (of a head, or of each of its
channels), like 1/sqrt(D), is folded into the query and the scale of V into the output. Where each
token has scales of its own, that of K multiplies its score and that of V its weight.

For a query with scores s_t over its visible positions, out = sum_t e^(s_t - m) v_t / sum_t
e^(s_t - m) with m = max_t s_t. Scores and products are taken block by block of 64 positions, always
whole blocks, masked, and the blocks' partial sums are added in order. Invisible positions add
exact zeros, so that neither the length of the longest sequence in the batch nor the cut of a
prefill into chunks changes a bit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernels.cpu.linear import product
from kernels.numerics import FP8, INT8, block_absmax, choose_scale, quantize

KV_BLOCK = 64
_BY_STORAGE = {kind.storage: kind for kind in (INT8, FP8)}
SCORES_AT_ONCE = 1 << 22  # elements; bounds the memory of a long prefill


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    dynamic: bool,
) -> None:
    """See `kernels.ops.write_kv`."""
    block, offset = slots // KV_BLOCK, slots % KV_BLOCK
    for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if scale is None:
            pool[block, :, offset] = x.to(pool.dtype)
            continue
        kind = _BY_STORAGE[pool.dtype]
        if dynamic:
            own = choose_scale(block_absmax(x, (1, 1, -1)), kind)  # [T, Hkv, 1]
            scale[block, :, offset] = own[..., 0]
        else:
            own = scale.reshape(1, scale.shape[0], -1)  # [1, Hkv, 1 or D]
        pool[block, :, offset] = quantize(x, own, kind)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float,
    sliding_window: int | None,
) -> Tensor:
    """See `kernels.ops.paged_attention`."""
    kv_heads = k_pool.shape[1]
    group = q.shape[1] // kv_heads
    fold = torch.full((kv_heads, 1, 1), softmax_scale)
    per_token = k_scale is not None and k_scale.dim() == 3
    if k_scale is not None and not per_token:
        fold = fold * k_scale.reshape(kv_heads, 1, -1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, contexts = query_start.tolist(), context_len.tolist()
    for first, last in _equal_runs(starts):  # sequences with as many queries each
        count = starts[first + 1] - starts[first]
        context = torch.tensor(contexts[first:last])
        longest = max(contexts[first:last])
        per_query = (last - first) * q.shape[1] * longest
        step = max(1, SCORES_AT_ONCE // max(1, per_query))
        sequences = q[starts[first] : starts[last]].unflatten(0, (last - first, count))
        target = out[starts[first] : starts[last]].unflatten(0, (last - first, count))
        for begin in range(0, count, step):
            end = min(count, begin + step)
            position = context[:, None] - count + torch.arange(begin, end)  # [S, n]
            blocks = -(-(longest - count + end) // KV_BLOCK)
            table = block_tables[first:last, :blocks]
            token_scales = None
            if per_token and k_scale is not None and v_scale is not None:
                token_scales = (k_scale[table], v_scale[table])
            rows = sequences[:, begin:end].unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4)
            result = _attend(
                rows.flatten(2, 3).float() * fold,  # [S, Hkv, n * group, D]
                k_pool[table],  # [S, blocks, Hkv, 64, D]
                v_pool[table],
                position.repeat_interleave(group, dim=1),
                sliding_window,
                token_scales,
            )
            if v_scale is not None and not per_token:
                result = result * v_scale.reshape(-1, 1, 1)
            result = result.unflatten(2, (end - begin, group)).permute(0, 2, 1, 3, 4)
            target[:, begin:end] = result.flatten(2, 3).to(out.dtype)
    return out


def _equal_runs(starts: list[int]) -> list[tuple[int, int]]:
    """Runs [first, last) of neighbouring sequences with equally many, at least one, queries."""
    counts = [b - a for a, b in itertools.pairwise(starts)]
    runs, first = [], 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[first]:
            if counts[first] > 0:
                runs.append((first, i))
            first = i
    return runs


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    sliding_window: int | None,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of one batch of equally many queries.

    Args:
        q: fp32 [S, Hkv, R, D], scaled.
        k: [S, B, Hkv, 64, D], as cached.
        v: Likewise.
        position: int64 [S, R], position of each row's query.
        sliding_window: Positions seen, or None.
        scales: Of each token's K and V, fp32 [S, B, Hkv, 64] both, or None.

    Returns:
        fp32 [S, Hkv, R, D], before a static scale of V.
    """
    blocks = k.shape[1]
    scores = product(q.unsqueeze(1), k.float().transpose(-1, -2))  # [S, B, Hkv, R, 64]
    if scales is not None:
        scores = scores * scales[0].unsqueeze(3)
    key = torch.arange(blocks * KV_BLOCK).view(1, blocks, 1, 1, KV_BLOCK)
    own = position[:, None, None, :, None]
    hidden = key > own
    if sliding_window is not None:
        hidden = hidden | (key <= own - sliding_window)
    scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=(1, 4), keepdim=True).clamp_(min=-1e30)  # finite if all is hidden
    weights = torch.exp(scores.sub_(top))
    sums = weights.sum(dim=-1, keepdim=True)  # [S, B, Hkv, R, 1]
    if scales is not None:
        weights = weights * scales[1].unsqueeze(3)
    products = product(weights, v.float())  # [S, B, Hkv, R, D]
    numerator, denominator = products[:, 0], sums[:, 0]
    for block in range(1, blocks):
        numerator = numerator + products[:, block]
        denominator = denominator + sums[:, block]
    return numerator / denominator.clamp(min=1e-30)
