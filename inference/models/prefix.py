"""Keys and values that an adapter of prefix tuning gives, as a decoder's cache takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kernels.ops as ops
from formats.adapters.prefix import Prefix
from inference.models.config import ModelConfig
from kernels.attention_inputs import KVPool


class CachedPrefix:
    """A prefix for a decoder: channels of K in the order in which rotation wants them."""

    def __init__(self, config: ModelConfig, prefix: Prefix) -> None:
        heads = (config.kv_heads, config.head_dim)
        keys, self._values = prefix.keys.unflatten(2, heads), prefix.values.unflatten(2, heads)
        order = config.channels
        self._keys = keys if order is None else keys[..., list(order)].contiguous()

    def __len__(self) -> int:
        return self._keys.shape[1]

    def write(self, pools: Sequence[KVPool], start: int, slots: Sequence[int]) -> None:
        """Put K and V of as many tokens as there are slots, from `start` on, into the cache.

        Args:
            start: Position of the first token.
            slots: Of each token, block * 64 + offset.
        """
        own, at = slice(start, start + len(slots)), torch.tensor(slots)
        positions = torch.arange(own.start, own.stop)
        for keys, values, pool in zip(self._keys, self._values, pools, strict=True):
            k = keys[own] if not pool.turn else ops.turn_heads(keys[own], pool.turn)
            ops.write_kv(k, values[own], pool, at, positions)
