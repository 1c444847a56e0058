"""Decode attention as the front of `kernels.cuda.fused_block`: which it takes, what it is given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.structures import pointer
from kernels.op_inputs import AttentionInputs, KVPool
from kernels.triton.common import require
from kernels.triton.tuning import power_at_most

MOST_QUERIES = 8  # of a KV head
BITS = {torch.int8: 8, torch.bfloat16: 16}


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention.

    Attributes:
        kv_heads: Heads of K and V.
        queries: Of each.
        dim: Channels of a head.
        cache: Bits of K and V: int8 with a scale for each head, or bf16.
    """

    kv_heads: int
    queries: int
    dim: int
    cache: int

    @property
    def outputs(self) -> int:
        """Of the layer of q, k and v."""
        return (self.queries + 2) * self.kv_heads * self.dim

    def splits(self, rows: int, programs: int) -> int:
        """Programs that share a KV head of a token; 0 where there are too few."""
        each = programs // (rows * self.kv_heads)
        return power_at_most(min(each, self.dim)) if each else 0

    def shared(self, warps: int, rows: int) -> int:
        """Bytes of shared memory: the source's `Attending`."""
        results, tokens = self.queries * self.dim, 16 * warps
        first = max(16 * (self.dim + 4 + tokens + 4), 12 * results)
        parts = warps * 16 // self.dim
        return first + 4 * parts * results + rows * self.dim * self.cache // 4 + 64 * warps + 48

    def handed_on(self, rows: int, programs: int, of_inner: int) -> int:
        """Bytes of what programs hand on, an output having `of_inner`."""
        results, items = self.queries * self.dim, rows * self.kv_heads
        splits = self.splits(rows, programs)
        return items * (4 * splits * (results + 2 * self.queries) + of_inner * results)

    def values(self, rows: int, programs: int) -> dict[str, int]:
        """What the source is compiled with."""
        own = {"KV_HEADS": self.kv_heads, "QUERIES": self.queries, "DIM": self.dim}
        return own | {"CACHE": self.cache, "SPLITS": self.splits(rows, programs)}


class CacheArguments(ctypes.Structure):
    """The source's `Cache`."""

    _fields_ = (
        ("read", ctypes.c_void_p),
        ("norm", ctypes.c_void_p * 2),
        ("turn", ctypes.c_void_p * 2),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("pages", ctypes.c_void_p * 2),
        ("scale", ctypes.c_void_p * 2),
        ("offset", ctypes.c_void_p),
        ("softmax_scale", ctypes.c_float),
        ("width", ctypes.c_int),
    )


@dataclass(frozen=True)
class Attention:
    """Attention of new tokens, each of a sequence of its own or drafts that follow one.

    Attributes:
        qkv: What the layer of q, k and v gives, bf16 [rows, outputs].
        norms: Weights of the norms of heads of q and of k, bf16 [D], or None for both.
        turn: Cosines and sines of all positions, fp32 [positions, D].
        positions: int64 [rows].
        slots: int64 [rows], where K and V of the tokens go; negative where they go nowhere.
        inputs: What the queries see. Block tables, lengths, positions and slots were written before
            the kernel ahead of this started.
    """

    qkv: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    turn: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    inputs: AttentionInputs

    def arguments(self, shape: AttentionShape) -> CacheArguments:
        """What the kernel takes.

        Raises:
            ValueError: a shape or type is another.
        """
        rows, pool, own = len(self.qkv), self.inputs.pool, self.inputs
        width = own.block_tables.shape[1]
        for name, x, dtype, size in (
            ("qkv", self.qkv, torch.bfloat16, (rows, shape.outputs)),
            ("positions", self.positions, torch.int64, (rows,)),
            ("slots", self.slots, torch.int64, (rows,)),
            ("block tables", own.block_tables, torch.int32, (rows, width)),
            ("contexts", own.context_len, torch.int32, (rows,)),
            ("cosines", self.turn[0], torch.float32, (len(self.turn[0]), shape.dim)),
            ("sines", self.turn[1], torch.float32, (len(self.turn[0]), shape.dim)),
        ):
            found = f"{name}: {x.dtype} {tuple(x.shape)}; needed is contiguous {dtype} {size}"
            require(x.shape == size and x.dtype == dtype and x.is_contiguous(), found)
        require(_takes(pool, shape), f"the cache is not one of {shape}")
        return CacheArguments(
            pointer(self.qkv),
            tuple(map(pointer, self.norms)),
            tuple(map(pointer, self.turn)),
            *map(pointer, (self.positions, self.slots, own.block_tables, own.context_len)),
            (pointer(pool.k), pointer(pool.v)),
            (pointer(pool.k_scale), pointer(pool.v_scale)),
            pointer(pool.k_offset),
            own.softmax_scale,
            width,
        )


def _takes(pool: KVPool, shape: AttentionShape) -> bool:
    """Whether a cache is of a shape."""
    sizes = (*pool.k.shape[1:], *pool.v.shape[1:])
    return (
        BITS.get(pool.k.dtype) == BITS.get(pool.v.dtype) == shape.cache
        and sizes == (shape.kv_heads, 64, shape.dim, shape.kv_heads, shape.dim, 64)
        and (pool.k_scale is None) == (shape.cache == 16)
    )


def attention_shape(inputs: AttentionInputs, heads: int) -> AttentionShape | None:
    """The shape that the kernel is compiled for; None where it does not take the attention.

    It takes rows of one token, which sees all before it, heads of 64 or 128 channels with up to 8
    queries each, and a cache in bf16, or in int8 with a static scale for each head, whose keys are
    not turned.

    Args:
        inputs: What the queries see.
        heads: Of q.
    """
    pool = inputs.pool
    kv_heads, dim = pool.k.shape[1], pool.k.shape[-1]
    queries, cache = heads // kv_heads, BITS.get(pool.k.dtype, 0)
    plain = inputs.query_start is inputs.sliding_window is None and not inputs.changes_logits
    stored = not (pool.dynamic or pool.turn) and pool.k_feedback is pool.sink_k is None
    static = pool.k_scale is None or pool.k_scale.dim() == 1
    shape = AttentionShape(kv_heads, queries, dim, cache)
    sized = heads % kv_heads == 0 and queries <= MOST_QUERIES and dim in (64, 128)
    return shape if plain and stored and static and sized and _takes(pool, shape) else None
