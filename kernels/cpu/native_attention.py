"""Cache writes and attention on the CPU, of the compiled kernels.

The functions have the contracts of those of the same name in `kernels.ops`. Caches of other types
than fp32, bf16, int8 and e4m3 are left to `kernels.cpu.attention`.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int32
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cpu import attention as torch_attention
from kernels.cpu import native
from kernels.cpu.structures import (
    FORMATS,
    SCALE_CHANNEL,
    SCALE_HEAD,
    SCALE_NONE,
    SCALE_TOKEN,
    STORAGE_NAMES,
    AttentionArgs,
    WriteKvArgs,
    pointer,
)

KV_BLOCK = torch_attention.KV_BLOCK
_POOLS = {dtype: FORMATS[name] for dtype, name in STORAGE_NAMES.items()}
_QUANTIZED = (torch.int8, torch.float8_e4m3fn)


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
    """See `kernels.ops.write_kv`.

    Raises:
        ValueError: shapes or types do not fit, a slot is not of the pool, or scales are to be taken
            from NaN or infinity; tokens with such a problem are not written, others may be.
    """
    if k_pool.dtype not in _POOLS:
        torch_attention.write_kv(k, v, k_pool, v_pool, slots, k_scale, v_scale, dynamic)
        return
    kinds = check_pools(k_pool, v_pool, k_scale, v_scale)
    if k.shape != v.shape or k.shape[1:] != k_pool.shape[1::2] or len(slots) != len(k):
        raise ValueError(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}; needed are "
            f"[T, {k_pool.shape[1]}, {k_pool.shape[3]}] twice, as the cache has, and [T]"
        )
    if dynamic != (kinds[0] == SCALE_TOKEN):
        raise ValueError("dynamic scales need a place for each token, and static ones have none")
    keys, values, problem = native.tokens(k), native.tokens(v), c_int32(0)
    if keys.stride(0) != values.stride(0):
        keys, values = keys.contiguous(), values.contiguous()
    slots = slots.to(torch.int64).contiguous()
    args = WriteKvArgs(
        *map(pointer, (keys, values, k_pool, v_pool, k_scale, v_scale, slots)),
        len(k),
        keys.stride(0),
        *k_pool.shape[1::2],
        _POOLS[k_pool.dtype],
        *kinds,
        k_pool.shape[0],
        addressof(problem),
    )
    native.loaded().ptq_write_kv(byref(args), torch.get_num_threads())
    native.report(problem)


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
    """See `kernels.ops.paged_attention`.

    Raises:
        ValueError: shapes or types do not fit, or a sequence needs a block that is not there.
    """
    if k_pool.dtype not in _POOLS:
        return torch_attention.paged_attention(
            q,
            k_pool,
            v_pool,
            block_tables,
            query_start,
            context_len,
            k_scale,
            v_scale,
            softmax_scale,
            sliding_window,
        )
    kinds = check_pools(k_pool, v_pool, k_scale, v_scale)
    _check_queries(q, k_pool, block_tables, query_start, context_len, sliding_window)
    queries, out, problem = native.tokens(q), torch.empty(q.shape), c_int32(0)
    tables, starts, contexts = (
        t.to(torch.int64).contiguous() for t in (block_tables, query_start, context_len)
    )
    args = AttentionArgs(
        *map(pointer, (queries, out, k_pool, v_pool, k_scale, v_scale, tables, starts, contexts)),
        len(contexts),
        tables.shape[1],
        queries.stride(0),
        q.shape[1] * q.shape[2],
        q.shape[1],
        *k_pool.shape[1::2],
        sliding_window or 0,
        _POOLS[k_pool.dtype],
        *kinds,
        softmax_scale,
        k_pool.shape[0],
        addressof(problem),
        None,
    )
    if native.loaded().ptq_attention(byref(args), torch.get_num_threads()):
        raise MemoryError(f"no memory for the partial sums of {max(contexts.tolist())} positions")
    native.report(problem)
    return out.to(q.dtype)


def check_pools(
    k_pool: Tensor, v_pool: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[int, int]:
    """Kinds of the scales of K and V; ValueError where cache and scales do not fit."""
    shape = k_pool.shape
    if (
        v_pool.shape != shape
        or v_pool.dtype != k_pool.dtype
        or len(shape) != 4
        or shape[2] != KV_BLOCK
        or not (k_pool.is_contiguous() and v_pool.is_contiguous())
    ):
        raise ValueError(
            f"pools are {k_pool.dtype} {tuple(shape)} and {v_pool.dtype} {tuple(v_pool.shape)}; "
            f"needed are two of one type, contiguous [blocks, Hkv, {KV_BLOCK}, D]"
        )
    kinds = _scale_kind(k_scale, k_pool), _scale_kind(v_scale, v_pool)
    allowed = [(SCALE_NONE, SCALE_NONE)]
    if k_pool.dtype in _QUANTIZED:
        head, channel, token = SCALE_HEAD, SCALE_CHANNEL, SCALE_TOKEN
        allowed = [(head, head), (channel, head), (token, token)]
    if kinds not in allowed:
        raise ValueError(
            f"scales of K and V are {_shape(k_scale)} and {_shape(v_scale)} for a cache of "
            f"{k_pool.dtype} {tuple(shape)}; a quantized cache needs [Hkv] or [Hkv, D] for K and "
            f"[Hkv] for V, or [blocks, Hkv, {KV_BLOCK}] for both, contiguous fp32; a float one none"
        )
    return kinds


def _scale_kind(scale: Tensor | None, pool: Tensor) -> int:
    """Kind of a tensor of scales, or -1."""
    if scale is None:
        return SCALE_NONE
    kinds = {
        pool.shape[1:2]: SCALE_HEAD,
        pool.shape[1::2]: SCALE_CHANNEL,
        pool.shape[:3]: SCALE_TOKEN,
    }
    fits = scale.dtype == torch.float32 and scale.is_contiguous()
    return kinds.get(scale.shape, -1) if fits else -1


def _check_queries(
    q: Tensor,
    k_pool: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    sliding_window: int | None,
) -> None:
    """ValueError where queries, tables and lengths do not fit one another."""
    if q.dim() != 3 or q.shape[2] != k_pool.shape[3] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(
            f"q is {tuple(q.shape)} for a cache of {tuple(k_pool.shape)}; needed is [T, Hq, D] "
            "with the cache's D and a multiple of its heads"
        )
    starts, contexts = query_start.tolist(), context_len.tolist()
    counts = [b - a for a, b in pairwise(starts)]
    if len(counts) != len(contexts) or starts[0] != 0 or starts[-1] != len(q) or min(counts) < 0:
        raise ValueError(
            f"query_start is {starts} for {len(q)} queries of {len(contexts)} sequences; needed "
            f"are {len(contexts) + 1} numbers that rise from 0 to {len(q)}"
        )
    places = block_tables.shape[1] * KV_BLOCK
    if len(block_tables) != len(contexts) or not all(
        count <= context <= places for count, context in zip(counts, contexts, strict=True)
    ):
        raise ValueError(
            f"contexts are {contexts} with {counts} queries and block tables of "
            f"{tuple(block_tables.shape)}; a context holds its queries and has a block in its "
            f"table for each {KV_BLOCK} tokens"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"the sliding window is {sliding_window}; needed is 1 at least, or None")


def _shape(scale: Tensor | None) -> str:
    return "missing" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
