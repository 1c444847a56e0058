"""The paged cache of a decoder: what it has to hold, and its tensors layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.scheme import KVCacheSpec
from inference.config import EngineConfig
from inference.models.config import ModelConfig
from inference.scheduling.blocks import BlockChanges
from kernels.attention_inputs import KV_BLOCK, KVPool
from kernels.numerics import TYPES


@dataclass(frozen=True)
class CacheShape:
    """What a cache has to hold; how it lies in memory is the backend's.

    Attributes:
        blocks: Blocks of 64 tokens.
        kv_heads: Key and value heads.
        head_dim: Numbers of a head.
        spec: How K and V are quantized, or None.
        dtype: Type of K and V where they are not quantized; None leaves it to the backend.
        scales: Static scales of K and V, layer by layer; None where there are none.
    """

    blocks: int
    kv_heads: int
    head_dim: int
    spec: KVCacheSpec | None
    dtype: torch.dtype | None
    scales: Sequence[tuple[Tensor, Tensor] | None]

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        model: ModelConfig,
        sizes: EngineConfig,
        spec: KVCacheSpec | None,
    ) -> CacheShape:
        """The cache of a decoder.

        Args:
            checkpoint: Has the static scales.
            model: The decoder's shape.
            sizes: The engine's sizes, all resolved.
            spec: How K and V are quantized, or None.
        """
        assert sizes.kv_blocks is not None
        names = [f"model.layers.{i}.self_attn" for i in range(model.layers)]
        return cls(
            blocks=sizes.kv_blocks,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            spec=spec,
            dtype=None if sizes.kv_dtype is None else getattr(torch, sizes.kv_dtype),
            scales=[None if spec is None else checkpoint.kv_scales.get(name) for name in names],
        )

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's keys: [blocks, Hkv, 64, D]."""
        return self.blocks, self.kv_heads, KV_BLOCK, self.head_dim

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V in all layers, held in `dtype` where they are not quantized."""
        return 2 * math.prod(self.k_shape) * self._stored(dtype).itemsize * len(self.scales)

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        v_shape: tuple[int, int, int, int],
        dynamic_scales: torch.dtype,
    ) -> list[KVPool]:
        """A pool of zeros for each layer.

        Args:
            device: Where it lies.
            dtype: Of K and V where they are not quantized.
            v_shape: Shape of a layer's values.
            dynamic_scales: Type of scales that are taken from the data.
        """
        pools = []
        for scales in self.scales:
            k, v = (
                torch.zeros(shape, dtype=self._stored(dtype), device=device)
                for shape in (self.k_shape, v_shape)
            )
            if self.spec is None:
                pools.append(KVPool(k, v))
            elif self.spec.dynamic:
                k_scale, v_scale = (
                    torch.ones(self.k_shape[:3], dtype=dynamic_scales, device=device) for _ in "kv"
                )
                pools.append(KVPool(k, v, k_scale, v_scale, dynamic=True))
            else:
                assert scales is not None  # one scale for all heads is a view: contiguous
                k_scale, v_scale = (scale.to(device).contiguous() for scale in scales)
                pools.append(KVPool(k, v, k_scale, v_scale))
        return pools

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.spec is None else TYPES[self.spec.dtype].storage


def change_blocks(pools: Sequence[KVPool], changes: BlockChanges) -> None:
    """Do what the next step needs done to the cache; on a GPU behind the steps on their way."""
    copy_blocks(pools, changes.copies)
    clear_blocks(pools, changes.clears)


def copy_blocks(pools: Sequence[KVPool], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy K and V of blocks, and the scales of their tokens, from first to second of each pair.

    All are read before one is written.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, device=pools[0].k.device).T
    for pool in pools:
        own = (pool.k_scale, pool.v_scale) if pool.dynamic else ()
        for tensor in (pool.k, pool.v, *own):
            if tensor is not None:
                numbers = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
                numbers[targets] = numbers[sources]


def clear_blocks(pools: Sequence[KVPool], blocks: Sequence[int]) -> None:
    """Clear blocks of what may be NaN or infinite: V of floats.

    Kernels read whole blocks, and multiply by 0 what there is behind a sequence's last token.
    """
    floats = [pool.v for pool in pools if pool.v_scale is None]
    if blocks and floats:
        index = torch.tensor(blocks, device=floats[0].device)
        for v in floats:
            v.index_fill_(0, index, 0)
