"""The paged cache of a decoder: what it has to hold, and its tensors layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from formats.families.attention import LatentAttention
from formats.families.registry import find_family
from formats.modeling.layers import attention_names
from formats.scheme import KVCacheSpec
from inference.config import EngineConfig
from inference.models.fold import held_scales
from inference.models.model import KVHeads, ModelShape
from inference.scheduling.blocks import BlockChanges
from kernels.attention_inputs import KV_BLOCK, KVPool
from kernels.numerics import TYPES


@dataclass(frozen=True)
class LayerCache:
    """What a layer's cache has to hold.

    Attributes:
        heads: K and V of a token.
        scales: Static scales of K and V; None where there are none.
    """

    heads: KVHeads
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class CacheShape:
    """What a cache has to hold; how it lies in memory is the backend's.

    Attributes:
        blocks: Blocks of 64 tokens.
        layers: What is held of each layer.
        spec: How K and V are quantized, or None.
        dtype: Type of K and V where they are not quantized; None leaves it to the backend.
    """

    blocks: int
    layers: Sequence[LayerCache]
    spec: KVCacheSpec | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        model: ModelShape,
        sizes: EngineConfig,
        spec: KVCacheSpec | None,
    ) -> CacheShape:
        """The cache of a model.

        Args:
            checkpoint: Has the static scales.
            model: The model's shape.
            sizes: The engine's sizes, all resolved.
            spec: How K and V are quantized, or None.

        Raises:
            EngineError: it quantizes latents otherwise than with static scales, or the checkpoint
                has scales of latents and the model caches none.
        """
        assert sizes.kv_blocks is not None
        latent = any(heads.latent for heads in model.cached)
        if spec is not None and not spec.dynamic and not latent:
            _check_scaled(checkpoint)
        if spec is not None and spec.dynamic and latent:
            raise EngineError(
                f"the cache of the checkpoint is {spec.dtype} {spec.granularity}; one of latents "
                "has static scales alone. Quantize it with granularity per_head, or run it with "
                "quantized_kv=False"
            )
        scales: list[tuple[Tensor, Tensor] | None] = [None] * len(model.cached)
        if spec is not None and not spec.dynamic:
            scales = [checkpoint.kv_scales[name] for name in attention_names(checkpoint.config)]
        return cls(
            blocks=sizes.kv_blocks,
            layers=[
                LayerCache(heads, held_scales(own, heads.channels))
                for heads, own in zip(model.cached, scales, strict=True)
            ],
            spec=spec,
            dtype=None if sizes.kv_dtype is None else getattr(torch, sizes.kv_dtype),
        )

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V in all layers, held in `dtype` where they are not quantized."""
        each = (own.heads.count * (own.heads.k_size + own.heads.v_size) for own in self.layers)
        return self.blocks * KV_BLOCK * sum(each) * self._stored(dtype).itemsize

    def fitted(self, sizes: Callable[[int, int], tuple[int, int]]) -> CacheShape:
        """The same with heads of the sizes that kernels take; the numbers behind their own are 0.

        Args:
            sizes: Gives the sizes of heads of K and V for those of a layer.
        """
        return replace(self, layers=[_fitted(own, sizes) for own in self.layers])

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tokens_last: bool,
        dynamic_scales: torch.dtype,
    ) -> list[KVPool]:
        """A pool of zeros for each layer.

        Args:
            device: Where it lies.
            dtype: Of K and V where they are not quantized.
            tokens_last: Whether values lie as [blocks, Hkv, D, 64], not as [blocks, Hkv, 64, D];
                latents, which are keys too, never do.
            dynamic_scales: Type of scales that are taken from the data.
        """
        pools = []
        for layer in self.layers:
            heads = layer.heads
            places = (self.blocks, heads.count, KV_BLOCK)
            own = (KV_BLOCK, heads.v_size)[:: -1 if tokens_last and not heads.latent else 1]
            k, v = (
                torch.zeros(shape, dtype=self._stored(dtype), device=device)
                for shape in ((*places, heads.k_size), (*places[:2], *own))
            )
            if self.spec is None:
                pools.append(KVPool(k, v))
            elif self.spec.dynamic:
                k_scale, v_scale = (
                    torch.ones(places, dtype=dynamic_scales, device=device) for _ in "kv"
                )
                pools.append(KVPool(k, v, k_scale, v_scale, dynamic=True))
            else:
                assert layer.scales is not None  # one scale for all heads is a view: contiguous
                k_scale, v_scale = (scale.to(device).contiguous() for scale in layer.scales)
                pools.append(KVPool(k, v, k_scale, v_scale))
        return pools

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.spec is None else TYPES[self.spec.dtype].storage


def _check_scaled(checkpoint: Checkpoint) -> None:
    """Refuse static scales of latents for a model that caches K and V."""
    family = find_family(checkpoint.config)
    if family is not None and isinstance(family.attention, LatentAttention):
        raise EngineError(
            "the checkpoint has static scales of latents, and transformers' own code caches K and "
            "V instead. Run it without transformers_code, or with quantized_kv=False"
        )


def _fitted(layer: LayerCache, sizes: Callable[[int, int], tuple[int, int]]) -> LayerCache:
    heads, scales = layer.heads, layer.scales
    if heads.latent:  # its kernels take any size, and a scale of each number
        own = (
            None
            if scales is None
            else (
                scales[0].reshape(1, -1).expand(1, heads.k_size),
                scales[1].reshape(1, -1).expand(1, heads.v_size),
            )
        )
        return replace(layer, scales=own)
    wider = KVHeads(heads.count, *sizes(heads.k_size, heads.v_size))
    if scales is not None and scales[0].dim() > 1:  # of each channel of K
        added = wider.k_size - heads.k_size
        scales = torch.nn.functional.pad(scales[0], (0, added), value=1.0), scales[1]
    return LayerCache(wider, scales)


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
