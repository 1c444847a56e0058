"""Attention over the paged cache in plain torch: batched fp32 matrix products.

It runs where there are no compiled kernels, and for caches of types that those do not hold.

The cache's numbers are multiplied as they are: the scale of K (of a head, or of each of its
channels), like 1/sqrt(D), is folded into the query and the scale of V into the output. Where each
token has scales of its own, that of K multiplies its score and that of V its weight.

For a query with scores s_t over its visible positions, out = sum_t e^(s_t - m) v_t / sum_t
e^(s_t - m) with m = max_t s_t. Scores and products are taken block by block of 64 positions, always
whole blocks, masked, and the blocks' partial sums are added in order. A head's sink z, which has no
value, takes part in m and adds e^(z - m) to the denominator. Invisible positions add
exact zeros, so that neither the length of the longest sequence in the batch nor the cut of a
prefill into chunks changes a bit.

Attention over cached latents in plain torch (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

Scores are q^C_h W_h^UK c_t + q^R_h k^R_t. With the product q^C_h W_h^UK in the place of the query,
all heads attend to one "key" [c_t, k^R_t] of a token and one "value" c_t, and W_h^UV is multiplied
with what comes out: grouped-query attention with a single KV head, of which V is a part of K. That
is how it is computed here, by the functions above and with their promises.

The cache's integers are multiplied as they are: scales of the latent's channels and of the rotated
key are folded into the queries, those of the latent into the output.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.packed_cache import channels, unpack_halves
from kernels.reference import product

SCORES_AT_ONCE = 1 << 22  # elements; bounds the memory of a long prefill


def paged_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """See `kernels.ops.paged_attention`."""
    out = q.new_empty((*q.shape[:2], channels(inputs.pool.v)))
    starts, contexts = query_starts(inputs), inputs.context_len.tolist()
    for first, last in _equal_runs(starts):  # sequences with as many queries each
        own, rows = slice(first, last), slice(starts[first], starts[last])
        shape = (last - first, starts[first + 1] - starts[first])
        _attend_alike(
            q[rows].unflatten(0, shape),
            out[rows].unflatten(0, shape),
            contexts[own],
            replace(inputs, block_tables=inputs.block_tables[own]),
        )
    return out


def query_starts(inputs: AttentionInputs) -> list[int]:
    """Where each sequence's queries begin, and where the last one's end."""
    if inputs.query_start is None:
        return list(range(len(inputs.context_len) + 1))
    return inputs.query_start.tolist()


def _attend_alike(q: Tensor, out: Tensor, contexts: list[int], inputs: AttentionInputs) -> None:
    """Attention of sequences with n queries each: [S, n, Hq, D], as many at once as memory allows.

    Args:
        q: The queries.
        out: Where results go, of the same shape.
        contexts: Tokens of each sequence.
        inputs: With the block tables of these sequences.
    """
    count, longest = q.shape[1], max(contexts)
    step = max(1, SCORES_AT_ONCE // max(1, len(contexts) * q.shape[2] * longest))
    context = torch.tensor(contexts)[:, None]
    for begin in range(0, count, step):
        end = min(count, begin + step)
        position = context - count + torch.arange(begin, end)  # [S, n]
        blocks = -(-(longest - count + end) // KV_BLOCK)
        part = replace(inputs, block_tables=inputs.block_tables[:, :blocks])
        out[:, begin:end] = _attend_part(q[:, begin:end], position, part).to(out.dtype)


def _attend_part(q: Tensor, position: Tensor, inputs: AttentionInputs) -> Tensor:
    """Attention of queries [S, n, Hq, D] at positions [S, n]: fp32 [S, n, Hq, Dv]."""
    pool, table = inputs.pool, inputs.block_tables
    kv_heads = pool.k.shape[1]
    group = q.shape[2] // kv_heads

    def by_row(heads: Tensor | None) -> Tensor | None:
        """Numbers of heads [Hq] as those of rows, [1, 1, Hkv, n * group, 1]."""
        if heads is None:
            return None
        own = heads.view(1, 1, kv_heads, 1, group).expand(-1, -1, -1, q.shape[1], -1)
        return own.flatten(3).unsqueeze(-1)

    fold = torch.full((kv_heads, 1, 1), inputs.softmax_scale)
    per_token, static_v = None, None
    if pool.k_scale is not None and pool.v_scale is not None:
        if pool.k_scale.dim() == 3:
            per_token = (pool.k_scale[table].float(), pool.v_scale[table].float())
        else:
            fold = fold * pool.k_scale.reshape(kv_heads, 1, -1)
            static_v = pool.v_scale.reshape(-1, 1, 1)
    rows = q.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4)
    k, v = _numbers(pool.k[table]), _numbers(pool.v[table])  # [S, blocks, Hkv, 64, D]
    if pool.sink_k is not None and pool.sink_v is not None:
        own_k, own_v = (held[table[:, 0]].float() for held in (pool.sink_k, pool.sink_v))
        count = pool.sink_tokens
        if per_token is not None:
            per_token = (_ones_at_first(per_token[0], count), _ones_at_first(per_token[1], count))
        elif static_v is not None and pool.k_scale is not None:  # in units of what is read
            own_k = own_k / pool.k_scale.reshape(1, kv_heads, 1, -1)
            own_v = own_v / static_v
        k, v = k.float(), v.float()
        k[:, 0, :, :count], v[:, 0, :, :count] = own_k, own_v
    result = _attend(
        rows.flatten(2, 3).float() * fold,  # [S, Hkv, n * group, D]
        k,
        v,
        position.repeat_interleave(group, dim=1),
        replace(inputs, sinks=by_row(inputs.sinks), alibi=by_row(inputs.alibi)),
        per_token,
    )
    if static_v is not None:
        result = result * static_v
    return result.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _ones_at_first(scale: Tensor, count: int) -> Tensor:
    """Scales of tokens [S, blocks, Hkv, 64], but 1 for the first `count` of each sequence."""
    own = scale.clone()
    own[:, 0, :, :count] = 1.0
    return own


def _numbers(held: Tensor) -> Tensor:
    """What is cached, as numbers: int4 is taken out of its bytes."""
    return unpack_halves(held) if held.dtype == torch.uint8 else held


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
    inputs: AttentionInputs,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of one batch of equally many queries.

    Args:
        q: fp32 [S, Hkv, R, D], scaled.
        k: [S, B, Hkv, 64, D], as cached.
        v: [S, B, Hkv, 64, Dv], as cached.
        position: int64 [S, R], position of each row's query.
        inputs: How they see, with sinks and slopes of each row, [1, 1, Hkv, R, 1].
        scales: Of each token's K and V, fp32 [S, B, Hkv, 64] both, or None.

    Returns:
        fp32 [S, Hkv, R, Dv], before a static scale of V.
    """
    blocks = k.shape[1]
    scores = product(q.unsqueeze(1), k.float().transpose(-1, -2))  # [S, B, Hkv, R, 64]
    if scales is not None:
        scores = scores * scales[0].unsqueeze(3)
    if inputs.softcap is not None:
        scores = torch.tanh(scores / inputs.softcap) * inputs.softcap
    key = torch.arange(blocks * KV_BLOCK).view(1, blocks, 1, 1, KV_BLOCK)
    own = position[:, None, None, :, None]
    if inputs.alibi is not None:
        scores = scores + inputs.alibi * (key - own)
    hidden = key > own
    if inputs.sliding_window is not None:
        hidden = hidden | (key <= own - inputs.sliding_window)
    scores = scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=(1, 4), keepdim=True).clamp_(min=-1e30)  # finite if all is hidden
    if inputs.sinks is not None:
        top = torch.maximum(top, inputs.sinks)
    weights = torch.exp(scores.sub_(top))
    sums = weights.sum(dim=-1, keepdim=True)  # [S, B, Hkv, R, 1]
    if scales is not None:
        weights = weights * scales[1].unsqueeze(3)
    products = product(weights, v.float())  # [S, B, Hkv, R, D]
    numerator, denominator = products[:, 0], sums[:, 0]
    for block in range(1, blocks):
        numerator = numerator + products[:, block]
        denominator = denominator + sums[:, block]
    if inputs.sinks is not None:
        denominator = denominator + torch.exp(inputs.sinks - top)[:, 0]
    return numerator / denominator.clamp(min=1e-30)


def latent_attention(q: Tensor, rotated: Tensor, inputs: AttentionInputs) -> Tensor:
    """See `kernels.ops.latent_attention`."""
    pool, scale = inputs.pool, inputs.pool.v_scale
    assert not pool.dynamic  # refused where the cache is made
    wide = [x.float() for x in (q, rotated)]
    if scale is not None and pool.k_scale is not None:
        wide = [x * own.flatten() for x, own in zip(wide, (scale, pool.k_scale), strict=True)]
    blocks = inputs.block_tables.flatten()
    table = torch.arange(len(blocks)).view_as(inputs.block_tables)
    latents, keys = pool.v[blocks], pool.k[blocks]
    own_k = own_v = None
    if pool.sink_k is not None and pool.sink_v is not None:
        own_k, own_v = pool.sink_k[blocks].float(), pool.sink_v[blocks].float()
        if scale is not None and pool.k_scale is not None:  # in units of what is read
            own_k, own_v = own_k / pool.k_scale.flatten(), own_v / scale.flatten()
        own_k = torch.cat((own_v, own_k), -1)
    seen = KVPool(
        torch.cat((_bytes(latents), _bytes(keys)), -1).view(pool.k.dtype),
        latents,
        sink_k=own_k,
        sink_v=own_v,
    )
    out = paged_attention(torch.cat(wide, -1), replace(inputs, pool=seen, block_tables=table))
    return (out if scale is None else out * scale.flatten()).to(q.dtype)


def _bytes(x: Tensor) -> Tensor:
    """e4m3 as bytes: what moves tensors takes no such numbers."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def heads_product(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own matrix: [T, H, n] times [H, n, m], in the type of `x`."""
    return product(x.transpose(0, 1).to(weight.dtype), weight).transpose(0, 1).to(x.dtype)
