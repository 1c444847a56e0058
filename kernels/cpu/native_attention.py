"""Cache writes and attention of the compiled kernels.

The functions have the contracts of those of the same name in `kernels.ops`. Caches of other types
than fp32, bf16, int8, e4m3 and int4 are left to plain torch.
"""

from __future__ import annotations

from ctypes import addressof, c_int32
from itertools import pairwise

import torch
from torch import Tensor

import kernels.reference as reference
import kernels.reference_attention as reference_attention
from kernels.cpu import native
from kernels.cpu.structures import (
    FORMATS,
    SCALE_CHANNEL,
    SCALE_HEAD,
    SCALE_NONE,
    SCALE_TOKEN,
    SCALE_TOKEN_F16,
    STORAGE_NAMES,
    AttentionArgs,
    WriteKvArgs,
    pointer,
)
from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.packed_cache import channels

_POOLS = {dtype: FORMATS[name] for dtype, name in STORAGE_NAMES.items()} | {
    torch.uint8: FORMATS["int4"]
}
_MIXED = (torch.int8, torch.uint8)
_QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.uint8)


def write_kv(
    k: Tensor, v: Tensor, pool: KVPool, slots: Tensor, positions: Tensor | None = None
) -> None:
    """See `kernels.ops.write_kv`.

    Raises:
        ValueError: shapes or types do not fit, a slot is not of the pool, or scales are to be taken
            from NaN or infinity; tokens with such a problem are not written, others may be.
    """
    if not {pool.k.dtype, pool.v.dtype} <= _POOLS.keys():
        reference.write_kv(k, v, pool, slots, positions)
        return
    kinds = check_pool(pool)
    held = [(x.shape[1], channels(x)) for x in (pool.k, pool.v)]
    if [tuple(x.shape[1:]) for x in (k, v)] != held or not len(slots) == len(k) == len(v):
        raise ValueError(
            f"k is {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}; needed are "
            f"[T, {held[0][0]}, {held[0][1]}] and [T, {held[1][0]}, {held[1][1]}], as the cache "
            "has, and [T]"
        )
    if pool.dynamic != (kinds[0] in (SCALE_TOKEN, SCALE_TOKEN_F16)):
        raise ValueError("dynamic scales need a place for each token, and static ones have none")
    if pool.k_offset is not None and pool.k_offset.shape != k.shape[1:]:
        raise ValueError(f"k_offset is {_shape(pool.k_offset)}; needed is fp32 {list(k.shape[1:])}")
    wide = (*k.shape[1:], k.shape[2])
    if pool.k_feedback is not None and (
        pool.k_feedback.shape != wide or kinds[0] != SCALE_TOKEN_F16 or pool.k.dtype != torch.uint8
    ):
        raise ValueError(
            f"k_feedback is {_shape(pool.k_feedback)}; needed is fp32 {list(wide)}, and int4 keys "
            "with dynamic scales"
        )
    if pool.sink_tokens and (positions is None or len(positions) != len(slots)):
        raise ValueError("a pool with sink tokens needs the position of each token: int64 [T]")
    keys, values, problem = native.tokens(k), native.tokens(v), c_int32(0)
    slots = slots.to(torch.int64).contiguous()
    where = None if positions is None else positions.to(torch.int64).contiguous()
    args = WriteKvArgs(
        *map(pointer, (keys, values, pool.k, pool.v, pool.k_scale, pool.v_scale)),
        *map(pointer, (pool.k_offset, pool.k_feedback, pool.sink_k, pool.sink_v, slots, where)),
        len(k),
        keys.stride(0),
        values.stride(0),
        *held[0],
        held[1][1],
        *formats(pool),
        *kinds,
        pool.k.shape[0],
        pool.sink_tokens,
        addressof(problem),
    )
    native.call("write_kv", args)
    native.report(problem)


def paged_attention(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """See `kernels.ops.paged_attention`.

    Raises:
        ValueError: shapes or types do not fit, or a sequence needs a block that is not there.
    """
    pool = inputs.pool
    if not {pool.k.dtype, pool.v.dtype} <= _POOLS.keys():
        return reference_attention.paged_attention(q, inputs)
    kinds, starts = check_pool(pool), reference_attention.query_starts(inputs)
    _check_queries(q, inputs, starts)
    v_dim, problem = channels(pool.v), c_int32(0)
    queries, out = native.tokens(q), torch.empty(*q.shape[:2], v_dim)
    tables, contexts = (
        t.to(torch.int64).contiguous() for t in (inputs.block_tables, inputs.context_len)
    )
    begins = torch.tensor(starts)
    cache = (pool.k, pool.v, pool.k_scale, pool.v_scale, pool.sink_k, pool.sink_v)
    sinks, alibi = (
        None if x is None else x.float().contiguous() for x in (inputs.sinks, inputs.alibi)
    )
    args = AttentionArgs(
        *map(pointer, (queries, out, *cache, tables, begins, contexts)),
        len(contexts),
        tables.shape[1],
        queries.stride(0),
        q.shape[1] * v_dim,
        *map(pointer, (sinks, alibi)),
        q.shape[1],
        pool.k.shape[1],
        channels(pool.k),
        v_dim,
        inputs.sliding_window or 0,
        *formats(pool),
        *kinds,
        inputs.softmax_scale,
        inputs.softcap or 0.0,
        pool.k.shape[0],
        pool.sink_tokens,
        addressof(problem),
        None,
    )
    if native.call("attention", args):
        raise MemoryError(f"no memory for the partial sums of {max(contexts.tolist())} positions")
    native.report(problem)
    return out.to(q.dtype)


def formats(pool: KVPool) -> tuple[int, int]:
    """Numbers of the types of K and V in `csrc/api.h`."""
    return _POOLS[pool.k.dtype], _POOLS[pool.v.dtype]


def check_pool(pool: KVPool) -> tuple[int, int]:
    """Kinds of the scales of K and V; ValueError where cache and scales do not fit."""
    shape = pool.k.shape
    if (
        pool.v.shape[:3] != shape[:3]
        or pool.v.dim() != len(shape)
        or (pool.v.dtype != pool.k.dtype and (pool.k.dtype, pool.v.dtype) != _MIXED)
        or len(shape) != 4
        or shape[2] != KV_BLOCK
        or not (pool.k.is_contiguous() and pool.v.is_contiguous())
    ):
        raise ValueError(
            f"pools are {pool.k.dtype} {tuple(shape)} and {pool.v.dtype} {tuple(pool.v.shape)}; "
            f"needed are two of one type, contiguous [blocks, Hkv, {KV_BLOCK}, D], each with its D"
        )
    kinds = _scale_kind(pool.k_scale, pool.k), _scale_kind(pool.v_scale, pool.v)
    _check_sinks(pool)
    allowed = [(SCALE_NONE, SCALE_NONE)]
    if pool.k.dtype in _QUANTIZED:
        head, channel, token = SCALE_HEAD, SCALE_CHANNEL, SCALE_TOKEN
        allowed = [(head, head), (channel, head), (token, token)]
    if pool.v.dtype == torch.uint8:
        allowed = [(head, head), (channel, head), (SCALE_TOKEN_F16, SCALE_TOKEN_F16)]
    if kinds not in allowed:
        raise ValueError(
            f"scales of K and V are {_shape(pool.k_scale)} and {_shape(pool.v_scale)} for a cache "
            f"of {pool.k.dtype} {tuple(shape)}; a quantized cache needs [Hkv] or [Hkv, D] for K "
            f"and [Hkv] for V, or [blocks, Hkv, {KV_BLOCK}] for both, contiguous fp32 (of tokens, "
            "with int4, fp16); a float one none"
        )
    return kinds


def _check_sinks(pool: KVPool) -> None:
    """ValueError where room for sink tokens does not fit the cache."""
    count = pool.sink_tokens
    for held, own in ((pool.k, pool.sink_k), (pool.v, pool.sink_v)):
        wanted = (*held.shape[:2], count, channels(held))
        if count and (
            own is None
            or own.shape != wanted
            or own.dtype != torch.bfloat16
            or not own.is_contiguous()
            or count > KV_BLOCK
        ):
            raise ValueError(
                f"room for sink tokens is {None if own is None else tuple(own.shape)}; needed is "
                f"contiguous bf16 {wanted}, of at most {KV_BLOCK} tokens"
            )


def _scale_kind(scale: Tensor | None, pool: Tensor) -> int:
    """Kind of a tensor of scales, or -1."""
    if scale is None:
        return SCALE_NONE
    kinds = {
        pool.shape[1:2]: SCALE_HEAD,
        (pool.shape[1], channels(pool)): SCALE_CHANNEL,
        pool.shape[:3]: SCALE_TOKEN,
    }
    if not scale.is_contiguous():
        return -1
    if scale.dtype == torch.float16:
        return SCALE_TOKEN_F16 if scale.shape == pool.shape[:3] else -1
    fits = scale.dtype == torch.float32
    return kinds.get(scale.shape, -1) if fits else -1


def _check_queries(q: Tensor, inputs: AttentionInputs, starts: list[int]) -> None:
    """ValueError where queries, tables and lengths do not fit one another."""
    shape, contexts = inputs.pool.k.shape, inputs.context_len.tolist()
    if q.dim() != 3 or q.shape[2] != channels(inputs.pool.k) or q.shape[1] % shape[1]:
        raise ValueError(
            f"q is {tuple(q.shape)} for a cache of {tuple(shape)}; needed is [T, Hq, D] "
            "with the cache's D and a multiple of its heads"
        )
    counts = [b - a for a, b in pairwise(starts)]
    if len(counts) != len(contexts) or starts[0] != 0 or starts[-1] != len(q) or min(counts) < 0:
        raise ValueError(
            f"query_start is {starts} for {len(q)} queries of {len(contexts)} sequences; needed "
            f"are {len(contexts) + 1} numbers that rise from 0 to {len(q)}"
        )
    tables, window = inputs.block_tables, inputs.sliding_window
    places = tables.shape[1] * KV_BLOCK
    if len(tables) != len(contexts) or not all(
        count <= context <= places for count, context in zip(counts, contexts, strict=True)
    ):
        raise ValueError(
            f"contexts are {contexts} with {counts} queries and block tables of "
            f"{tuple(tables.shape)}; a context holds its queries and has a block in its "
            f"table for each {KV_BLOCK} tokens"
        )
    for name in ("sinks", "alibi"):
        own: Tensor | None = getattr(inputs, name)
        if own is not None and own.shape != q.shape[1:2]:
            raise ValueError(f"{name} are {tuple(own.shape)}; needed is [{q.shape[1]}], as q has")
    if inputs.softcap is not None and not inputs.softcap > 0:
        raise ValueError(f"softcap is {inputs.softcap}; needed is a positive number, or None")
    if window is not None and window < 1:
        raise ValueError(f"the sliding window is {window}; needed is 1 at least, or None")


def _shape(scale: Tensor | None) -> str:
    return "missing" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
