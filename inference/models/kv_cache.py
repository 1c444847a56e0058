"""The paged KV cache: which block belongs to whom, and the tensors that hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.errors import EngineError
from formats.scheme import KVCacheSpec
from inference.models.layers import Placement
from kernels.attention_inputs import KV_BLOCK, KVPool
from kernels.numerics import TYPES

CPU = Placement(torch.device("cpu"), torch.float32)


@dataclass(frozen=True)
class KVStats:
    """Blocks of the cache; `free + used + cached == total`, always."""

    total: int
    free: int
    used: int
    cached: int = 0


class BlockManager:
    """Hands out blocks of 64 tokens; pure bookkeeping.

    Args:
        total: Number of blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(total))
        self._tables: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def table(self, owner: str) -> list[int]:
        """Blocks of an owner in the order of its tokens."""
        return self._tables.get(owner, [])

    def missing(self, owner: str, tokens: int) -> int:
        """Blocks that an owner lacks to hold so many tokens."""
        return max(0, blocks_for(tokens) - len(self.table(owner)))

    def grow(self, owner: str, tokens: int) -> bool:
        """Give an owner blocks for so many tokens, or, if there are too few, change nothing."""
        count = self.missing(owner, tokens)
        if count > len(self._free):
            return False
        table = self._tables.setdefault(owner, [])
        table.extend(self._free.popleft() for _ in range(count))
        return True

    def release(self, owner: str) -> None:
        """Take all blocks of an owner back."""
        self._free.extend(self._tables.pop(owner, []))

    def stats(self) -> KVStats:
        """Counts."""
        return KVStats(self.total, self.free, sum(map(len, self._tables.values())))

    def check(self) -> None:
        """Every block is free or has one owner.

        Raises:
            EngineError: a block was lost or is held twice.
        """
        held = [block for table in self._tables.values() for block in table]
        if sorted([*self._free, *held]) != list(range(self.total)):
            raise EngineError(
                f"the cache's blocks do not add up: {len(self._free)} free, {len(held)} held, "
                f"{self.total} in all"
            )


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // KV_BLOCK)


def forget(pools: Sequence[KVPool], blocks: Sequence[int]) -> None:
    """Clear blocks of what may be NaN or infinite: V of floats.

    Kernels read whole blocks, and multiply by 0 what there is behind a sequence's last token.
    """
    floats = [pool.v for pool in pools if pool.v_scale is None]
    if blocks and floats:
        index = torch.tensor(blocks, device=floats[0].device)
        for v in floats:
            v.index_fill_(0, index, 0)


def make_pool(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    spec: KVCacheSpec | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    place: Placement = CPU,
) -> KVPool:
    """Allocate the cache of one layer.

    Args:
        shape: blocks, KV heads, 64, head_dim.
        dtype: Of K and V where they are not quantized.
        spec: How they are quantized, or None.
        scales: Static scales of K and V, where the specification has them.
        place: Where it runs: the layout of V, and the type of dynamic scales, are its kernels'.
    """
    blocks, heads, page, dim = shape
    kind = dtype if spec is None else TYPES[spec.dtype].storage
    device = place.device
    k = torch.zeros(shape, dtype=kind, device=device)
    v = torch.zeros(
        (blocks, heads, dim, page) if place.triton else shape, dtype=kind, device=device
    )
    if spec is None:
        return KVPool(k, v)
    if spec.dynamic:
        of_scales = torch.float16 if place.triton else torch.float32
        ones = [torch.ones(shape[:3], dtype=of_scales, device=device) for _ in "kv"]
        return KVPool(k, v, *ones, dynamic=True)
    assert scales is not None
    k_scale, v_scale = (s.to(device).contiguous() for s in scales)  # one for all heads is a view
    return KVPool(k, v, k_scale, v_scale)
