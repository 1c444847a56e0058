"""The paged cache as the kernels read it: its layout, its types, its scales, and their checks.

    k [pages, Hkv, 64, D]        v [pages, Hkv, D, 64]        int8, e4m3, bf16 or fp16
    k [pages, Hkv, 64, D / 2]    v [pages, Hkv, D / 2, 64]    uint8: int4, V alone or both

V is stored token by token, so that K q^T and V^T P^T both read whole lines. A byte of int4 holds
channels i (its low four bits) and i + D / 2 of a token in K and in V (`kernels.packed_cache`), so
that a token is written in whole bytes. Eight and four bits have scales: of heads ([Hkv]), of K's
channels ([Hkv, D], V's of heads), or of each token's head ([pages, Hkv, 64], fp16 where V is int4);
16 bits have none. In a product, they become fp16, which is exact, and 16-bit pages stay as they
are: so do q and the weights of V, which are rounded to that type.

Tiles are powers of two: of a head of another size the channels after its last one are read as 0.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.packed_cache import channels
from kernels.triton.common import eight_bits_to_fp16, has_e4m3, quantize, require

UNLIMITED = 1 << 30  # positions that no sliding window ends
LARGEST_HEAD = 512  # of multiples of 16
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
PACKED = torch.uint8  # int4, two numbers a byte
TYPES = (*QUANTIZED, torch.bfloat16, torch.float16)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # a maximum of nothing; finite, so that differences are
HIDDEN = tl.constexpr(float("-inf"))  # a score that is not seen: 2^(HIDDEN - any maximum) is 0
LIFT = tl.constexpr(256.0)  # of weights that a token's scale makes small, see attention
NO_SCALES, PER_HEAD, PER_CHANNEL, PER_TOKEN = (tl.constexpr(dims) for dims in range(4))


@triton.constexpr_function
def operand_type(kind):
    """The type of a product's operands for pages of a type; the interpreter has no bf16 sums."""
    if kind.primitive_bitwidth == 8:
        return tl.float16
    return tl.float32 if kind == tl.bfloat16 and triton.knobs.runtime.interpret else kind


@triton.constexpr_function
def lift_of(kind):
    """What weights are multiplied by with the scales of tokens, for a V of a type.

    It keeps them out of fp16's subnormal numbers; int4's scales are 16 times as large as int8's.
    """
    return LIFT.value / 16 if kind == tl.uint8 else LIFT.value


@triton.jit
def as_operand(x):
    """Pages as a product's operand."""
    if x.dtype.primitive_bitwidth == 8:
        x = eight_bits_to_fp16(x)
    return x.to(operand_type(x.dtype))


@triton.jit
def load_channels(places, inside, WHOLE: tl.constexpr):
    """What is at pointers, 0 outside of a head; WHOLE where the tile is the head."""
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def channels_of(j, DIM: tl.constexpr, WIDE: tl.constexpr, kind: tl.constexpr):
    """The channel at each place j of a tile of WIDE, for pages of a type; DIM or more for none.

    int4 tiles hold the low four bits of all bytes, then the high ones.
    """
    if kind == tl.uint8 and WIDE != DIM:
        i = j % (WIDE // 2)
        return tl.where(i < DIM // 2, j // (WIDE // 2) * (DIM // 2) + i, DIM)
    return j


@triton.jit
def keys_at(k_pages, page, at, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Tokens `at` of a page of K as a product's operand, [tokens, WIDE], see `channels_of`."""
    PACKED: tl.constexpr = k_pages.dtype.element_ty == tl.uint8
    ROW: tl.constexpr = DIM // 2 if PACKED else DIM
    i = tl.arange(0, WIDE // 2 if PACKED else WIDE)
    places = k_pages + page * (64 * ROW) + at[:, None] * ROW + i[None, :]
    k = load_channels(places, (i < ROW)[None, :], WIDE == DIM)
    if PACKED:
        k = tl.join(k & 15, k >> 4).permute(0, 2, 1).reshape(at.shape[0], WIDE).to(tl.int8) - 8
    return as_operand(k)


@triton.jit
def values_at(v_pages, page, at, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Tokens `at` of a page of V as a product's operand, [WIDE, tokens], see `channels_of`."""
    PACKED: tl.constexpr = v_pages.dtype.element_ty == tl.uint8
    ROWS: tl.constexpr = DIM // 2 if PACKED else DIM
    i = tl.arange(0, WIDE // 2 if PACKED else WIDE)
    places = v_pages + page * (64 * ROWS) + i[:, None] * 64 + at[None, :]
    v = load_channels(places, (i < ROWS)[:, None], WIDE == DIM)
    if PACKED:
        v = tl.join(v & 15, v >> 4).permute(2, 0, 1).reshape(WIDE, at.shape[0]).to(tl.int8) - 8
    return as_operand(v)


@triton.jit
def capped(s, softcap):
    """c tanh(x / c) log2 e of logits x, of which s is 2 x log2 e / c."""
    bound = softcap * LOG2_E
    return bound - 2.0 * bound / (tl.exp2(s) + 1.0)


@triton.jit
def finish(y, out, out_scale):
    """y in the type of `out`, quantized with one scale if that has eight bits."""
    TYPE: tl.constexpr = out.dtype.element_ty
    if TYPE.primitive_bitwidth == 8:
        y = quantize(y, tl.load(out_scale), TYPE)
    return y.to(TYPE)


def scale_kind(pool: KVPool) -> int:
    """0 for no scales, else K's number of dimensions: 1 of heads, 2 of channels, 3 of tokens."""
    return 0 if pool.k_scale is None else pool.k_scale.dim()


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError where a cache is e4m3 on a GPU that does not convert e4m3."""
    require(
        dtype != torch.float8_e4m3fn or has_e4m3(device),
        "this GPU has no e4m3 (capability 8.9 has): use an int8 cache",
    )


def head_size(pool: KVPool) -> int:
    """Channels of a head of K, and of V."""
    return channels(pool.k)


def is_head_size(dim: int) -> bool:
    """Whether there are kernels for heads of so many channels."""
    return dim % 16 == 0 and 0 < dim <= LARGEST_HEAD


def check_pages(pool: KVPool) -> None:
    """Raise ValueError where pages and scales do not fit each other."""
    (pages, heads, page, _), dim = pool.k.shape, head_size(pool)
    require(page == KV_BLOCK, f"pages hold {page} tokens; needed are {KV_BLOCK}")
    pair = pool.k.dtype, pool.v.dtype
    require(
        (pair[0] == pair[1] and pair[0] in (*TYPES, PACKED)) or pair == (torch.int8, PACKED),
        f"cache is {pair[0]} and {pair[1]}; needed is one of int8, float8_e4m3fn, bfloat16, "
        "float16, uint8 (two int4), or int8 and uint8",
    )
    check_fp8(pool.k.dtype, pool.k.device)
    rows = dim // 2 if pool.v.dtype == PACKED else dim
    require(
        tuple(pool.v.shape) == (pages, heads, rows, page),
        f"v is {tuple(pool.v.shape)}; needed is {(pages, heads, rows, page)}, tokens last",
    )
    require(
        is_head_size(dim),
        f"head size {dim} is not supported: multiples of 16 up to {LARGEST_HEAD} are",
    )
    k_scale, v_scale = pool.k_scale, pool.v_scale
    if pool.k.dtype not in (*QUANTIZED, PACKED):
        require(k_scale is None and v_scale is None, f"a cache of {pool.k.dtype} has no scales")
    elif k_scale is None or v_scale is None:
        raise ValueError(f"a cache of {pool.k.dtype} needs scales of K and of V")
    else:
        of_k = {1: (heads,), 2: (heads, dim), 3: (pages, heads, page)}
        of_v = {1: (heads,), 2: (heads,), 3: (pages, heads, page)}
        kind = k_scale.dim()
        require(
            tuple(k_scale.shape) == of_k.get(kind) and tuple(v_scale.shape) == of_v[kind],
            f"scales are {tuple(k_scale.shape)} and {tuple(v_scale.shape)}; needed are [{heads}], "
            f"or [{heads}, {dim}] for K, or both [{pages}, {heads}, {page}]",
        )
        require(
            kind != 3 or pool.v.dtype != PACKED or k_scale.dtype == v_scale.dtype == torch.float16,
            f"scales of tokens are {k_scale.dtype} and {v_scale.dtype}; beside int4 they are fp16",
        )
    require(
        all(x is None or x.is_contiguous() for x in (pool.k, pool.v, k_scale, v_scale)),
        "the cache and its scales must be contiguous",
    )
    if pool.sink_k is not None or pool.sink_v is not None:
        _check_sinks(pool, (pages, heads, pool.sink_tokens, dim))
    fed = pool.k_feedback
    require(
        fed is None
        or (
            tuple(fed.shape) == (heads, dim, dim)
            and fed.is_contiguous()
            and pool.dynamic
            and pool.k.dtype == PACKED
        ),
        f"k_feedback is {fed is not None and tuple(fed.shape)}; needed is contiguous "
        f"{(heads, dim, dim)}, and int4 keys with dynamic scales",
    )


def _check_sinks(pool: KVPool, needed: tuple[int, ...]) -> None:
    """Raise ValueError where K and V of sink tokens are not of a shape, or not beside scales."""
    for name, sink in (("sink_k", pool.sink_k), ("sink_v", pool.sink_v)):
        found = sink is not None and tuple(sink.shape)
        fits = sink is not None and found == needed and sink.is_contiguous()
        require(
            fits and pool.k_scale is not None,
            f"{name} is {found}; needed is contiguous {needed}, beside pages with scales",
        )


def check_queries(q: Tensor, inputs: AttentionInputs) -> None:
    """Raise ValueError where queries and sequences do not fit the cache."""
    heads, dim = inputs.pool.k.shape[1], head_size(inputs.pool)
    tables, lengths = inputs.block_tables, inputs.context_len
    require(
        q.dim() == 3 and q.shape[2] == dim and q.shape[1] % heads == 0 and q.is_contiguous(),
        f"q is {tuple(q.shape)}; needed is contiguous [., n * {heads}, {dim}]",
    )
    require(
        tables.shape[0] == lengths.shape[0] and tables.is_contiguous() and lengths.is_contiguous(),
        f"{tables.shape[0]} block tables and {lengths.shape[0]} contexts; needed are as many, "
        "contiguous",
    )
    for name, x in (("sinks", inputs.sinks), ("alibi", inputs.alibi)):
        require(
            x is None or (tuple(x.shape) == (q.shape[1],) and x.dtype == torch.float32),
            f"{name} is {x is not None and (x.dtype, tuple(x.shape))}; needed is fp32 "
            f"[{q.shape[1]}]",
        )
    require(
        inputs.softcap is None or inputs.softcap > 0,
        f"softcap is {inputs.softcap}; needed is a positive number",
    )


def result(
    q: Tensor, out: Tensor | None, out_scale: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Where attention's result goes: `out`, or a new tensor like q in `out_dtype`.

    Raises:
        ValueError: `out` does not fit, or a scale lacks where a type needs one.
    """
    if out is None:
        out = torch.empty_like(q, dtype=out_dtype or q.dtype)
    require(
        out.shape == q.shape and out.is_contiguous() and out_dtype in (None, out.dtype),
        f"out is {out.dtype} {tuple(out.shape)}; needed is contiguous {tuple(q.shape)}",
    )
    require(
        (out.dtype in QUANTIZED) == (out_scale is not None),
        f"a result in {out.dtype} {'needs' if out.dtype in QUANTIZED else 'takes no'} out_scale",
    )
    require(out_scale is None or out_scale.numel() == 1, "out_scale is one element")
    check_fp8(out.dtype, out.device)
    return out
