"""Row-wise ops, cache writes and attention on the CPU, of the compiled kernels.

The functions have the contracts of those of the same name in `kernels.ops`. The kernels take fp32;
activations of other types are widened on the way in and rounded on the way out. Caches of other
types than fp32, bf16, int8 and e4m3 are left to `kernels.cpu.attention`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cpu import attention as torch_attention
from kernels.cpu import native
from kernels.cpu.native import FORMATS, AttentionArgs, QuantizeArgs, WriteKvArgs, pointer

KV_BLOCK = torch_attention.KV_BLOCK
_POOLS = {dtype: FORMATS[name] for dtype, name in native.STORAGE_NAMES.items()}
_QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """See `kernels.ops.quantize_static`; NaN becomes 0."""
    q = torch.empty(x.shape, dtype=torch.int8)
    _quantize(_matrix(x), "int8", x.shape[-1], _single(scale), q=q)
    return q


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.quantize_per_token`."""
    q, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], 1)
    _quantize(_matrix(x), "int8", x.shape[-1], q=q, scales=scales)
    return q, scales


def fake_quantize_fp8(x: Tensor, scale: Tensor | None = None, group: int = -1) -> Tensor:
    """What a linear layer with e4m3 activations sees of its input.

    Args:
        x: [..., K].
        scale: Static scale, one element, or None where scales follow from the data.
        group: Elements of a row that share a scale where it follows from the data; -1 for all. The
            last group may be shorter.

    Returns:
        fp32, of the shape of `x`; bit for bit `kernels.numerics.fake_quantize_activations`.
    """
    values = torch.empty(x.shape)
    group = x.shape[-1] if group == -1 else min(group, x.shape[-1])
    single = None if scale is None else _single(scale)
    _quantize(_matrix(x), "fp8_e4m3", group, single, values=values)
    return values


def linear(x: Tensor, packed: Tensor, x_scale: Tensor | None) -> Tensor:
    """See `kernels.ops.linear`; fp32 [T, N]."""
    inputs = native.header(packed).inputs
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"x is {tuple(x.shape)}; the weight needs [T, {inputs}]")
    if (x.dtype == torch.int8) != (x_scale is not None):
        raise ValueError(f"x is {x.dtype}; integers need scales, and floats have none")
    if x_scale is not None and x_scale.numel() not in (1, len(x)):
        raise ValueError(f"{x_scale.numel()} scales for {len(x)} rows; needed is 1, or one a row")
    wide = x if x.dtype == torch.int8 else x.float()
    return native.linear(wide, packed, None if x_scale is None else x_scale.float())


def _quantize(
    x: Tensor,
    fmt: str,
    group: int,
    scale: Tensor | None = None,
    q: Tensor | None = None,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    if group < 1:
        raise ValueError(f"group is {group}; needed is a positive number, or -1 for whole rows")
    problem = c_int32(0)
    args = QuantizeArgs(
        x.data_ptr(),
        x.shape[0],
        x.shape[1],
        x.stride(0),
        group,
        pointer(scale),
        FORMATS[fmt],
        *map(pointer, (q, values, scales)),
        _address(problem),
    )
    native.loaded().ptq_quantize(byref(args), torch.get_num_threads())
    report(problem)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {tuple(weight.shape)}; needed is [{x.shape[-1]}], as x has")
    rows, wide = _matrix(x), weight.float().contiguous()
    y = torch.empty(x.shape)
    native.loaded().ptq_rms_norm(
        rows.data_ptr(),
        wide.data_ptr(),
        eps,
        y.data_ptr(),
        *rows.shape,
        rows.stride(0),
        torch.get_num_threads(),
    )
    return y.to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.ops.silu_mul`; `gate` and `up` may be two halves of one tensor's columns."""
    if gate.shape != up.shape:
        raise ValueError(f"gate is {tuple(gate.shape)} and up {tuple(up.shape)}; they must agree")
    wide, other = _matrix(gate), _matrix(up)
    if wide.stride(0) != other.stride(0):
        wide, other = wide.contiguous(), other.contiguous()
    y = torch.empty(gate.shape)
    native.loaded().ptq_silu_mul(
        wide.data_ptr(),
        other.data_ptr(),
        y.data_ptr(),
        *wide.shape,
        wide.stride(0),
        torch.get_num_threads(),
    )
    return y.to(gate.dtype)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.apply_rope`."""
    needed = (q.shape[0], q.shape[-1])
    if cos.shape != needed or sin.shape != needed or needed[1] % 2:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; needed are [T, D] with the T "
            f"and an even D of q, which is {tuple(q.shape)}"
        )
    if k.shape[::2] != needed:
        raise ValueError(f"k is {tuple(k.shape)}; needed are T and D of q, {tuple(q.shape)}")
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, y = _tokens(x), torch.empty(x.shape)
    native.loaded().ptq_rope(
        *map(pointer, (tokens, cos, sin, y)),
        *x.shape,
        tokens.stride(0),
        torch.get_num_threads(),
    )
    return y.to(x.dtype)


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
    if dynamic != (kinds[0] == native.SCALE_TOKEN):
        raise ValueError("dynamic scales need a place for each token, and static ones have none")
    keys, values, problem = _tokens(k), _tokens(v), c_int32(0)
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
        _address(problem),
    )
    native.loaded().ptq_write_kv(byref(args), torch.get_num_threads())
    report(problem)


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
    queries, out, problem = _tokens(q), torch.empty(q.shape), c_int32(0)
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
        _address(problem),
        None,
    )
    if native.loaded().ptq_attention(byref(args), torch.get_num_threads()):
        raise MemoryError(f"no memory for the partial sums of {max(contexts.tolist())} positions")
    report(problem)
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
    allowed = [(native.SCALE_NONE, native.SCALE_NONE)]
    if k_pool.dtype in _QUANTIZED:
        head, channel, token = native.SCALE_HEAD, native.SCALE_CHANNEL, native.SCALE_TOKEN
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
        return native.SCALE_NONE
    kinds = {
        pool.shape[1:2]: native.SCALE_HEAD,
        pool.shape[1::2]: native.SCALE_CHANNEL,
        pool.shape[:3]: native.SCALE_TOKEN,
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


def _matrix(x: Tensor) -> Tensor:
    """[..., K] as fp32 [T, K] whose columns are adjacent; rows may be apart."""
    rows = x.float()
    rows = rows if rows.dim() == 2 else rows.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tokens(x: Tensor) -> Tensor:
    """[T, heads, D] as fp32 with the heads of a token adjacent; tokens may be apart."""
    wide = x.float()
    return wide if wide.stride()[1:] == (wide.shape[2], 1) else wide.contiguous()


def _single(scale: Tensor) -> Tensor:
    """A tensor of one element as fp32."""
    if scale.numel() != 1:
        raise ValueError(f"a static scale has one element; found {tuple(scale.shape)}")
    return scale.float()


def _shape(scale: Tensor | None) -> str:
    return "missing" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"


def _address(problem: c_int32) -> int:
    return ctypes.addressof(problem)


def report(problem: c_int32) -> None:
    """Raise what a kernel found in the data.

    Raises:
        ValueError: it found something.
    """
    if problem.value & native.NONFINITE:
        raise ValueError("absmax must be finite and not negative; the data hold NaN or infinity")
    if problem.value & native.NO_SUCH_BLOCK:
        raise ValueError("a slot or a block table names a block that the cache does not have")
