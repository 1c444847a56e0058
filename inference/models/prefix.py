"""Keys and values that an adapter of prefix tuning gives, as a decoder's cache takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from formats.adapters.prefix import Prefix
from inference.models.config import ModelConfig


class CachedTokens(NamedTuple):
    """K and V of tokens that stand one after another, as `kernels.ops.write_kv` takes them.

    Attributes:
        keys: fp32 [blocks, T, Hkv, D], rotated.
        values: fp32 [blocks, T, Hkv, D].
        start: Position of the first token.
        slots: Of each token, block * 64 + offset.
    """

    keys: Tensor
    values: Tensor
    start: int
    slots: Sequence[int]


class CachedPrefix:
    """A prefix for a decoder: channels of K in the order in which rotation wants them."""

    def __init__(self, config: ModelConfig, prefix: Prefix) -> None:
        heads = (-1, config.head_dim)
        keys, self._values = prefix.keys.unflatten(2, heads), prefix.values.unflatten(2, heads)
        order = config.channels
        self._keys = keys if order is None else keys[..., list(order)].contiguous()

    def __len__(self) -> int:
        return self._keys.shape[1]

    def tokens(self, start: int, slots: Sequence[int]) -> CachedTokens:
        """As many of its tokens as there are slots, from `start` on."""
        own = slice(start, start + len(slots))
        return CachedTokens(self._keys[:, own], self._values[:, own], start, slots)
