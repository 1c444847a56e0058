"""The paged cache as the kernels read it: its layout, its types, its scales, and their checks.

    k [pages, Hkv, 64, D]    v [pages, Hkv, D, 64]    int8, e4m3, bf16 or fp16

V lies token by token, so that K q^T and V^T P^T both read whole lines. Eight bits have scales: of
heads ([Hkv]), of K's channels ([Hkv, D], V's of heads), or of each token's head
([pages, Hkv, 64]); 16 bits have none. In a product, 8-bit pages become fp16, which is exact, and
16-bit pages stay as they are: so do q and the weights of V, which are rounded to that type.

Tiles are powers of two: of a head of another size the channels behind its last one are read as 0.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.triton.common import eight_bits_to_fp16, has_e4m3, quantize, require

UNLIMITED = 1 << 30  # positions that no sliding window ends
LARGEST_HEAD = 256  # of multiples of 16
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
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


@triton.jit
def as_operand(x):
    """Pages as a product's operand."""
    if x.dtype.primitive_bitwidth == 8:
        x = eight_bits_to_fp16(x)
    return x.to(operand_type(x.dtype))


@triton.jit
def load_channels(places, inside, WHOLE: tl.constexpr):
    """What lies at pointers, 0 outside of a head; WHOLE where the tile is the head."""
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=inside, other=0.0)


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


def is_head_size(dim: int) -> bool:
    """Whether there are kernels for heads of so many channels."""
    return dim % 16 == 0 and 0 < dim <= LARGEST_HEAD


def check_pages(pool: KVPool) -> None:
    """Raise ValueError where pages and scales do not fit each other."""
    pages, heads, page, dim = pool.k.shape
    require(page == KV_BLOCK, f"pages hold {page} tokens; needed are {KV_BLOCK}")
    require(
        pool.k.dtype == pool.v.dtype and pool.k.dtype in TYPES,
        f"cache is {pool.k.dtype} and {pool.v.dtype}; needed is one of int8, float8_e4m3fn, "
        "bfloat16, float16",
    )
    check_fp8(pool.k.dtype, pool.k.device)
    require(
        tuple(pool.v.shape) == (pages, heads, dim, page),
        f"v is {tuple(pool.v.shape)}; needed is {(pages, heads, dim, page)}, tokens last",
    )
    require(
        is_head_size(dim),
        f"head size {dim} is not supported: multiples of 16 up to {LARGEST_HEAD} are",
    )
    k_scale, v_scale = pool.k_scale, pool.v_scale
    if pool.k.dtype not in QUANTIZED:
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
        all(x is None or x.is_contiguous() for x in (pool.k, pool.v, k_scale, v_scale)),
        "the cache and its scales must be contiguous",
    )


def check_queries(q: Tensor, inputs: AttentionInputs) -> None:
    """Raise ValueError where queries and sequences do not fit the cache."""
    _, heads, _, dim = inputs.pool.k.shape
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
