"""The paged cache of a decoder: what it has to hold, and its tensors layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from formats.cache_scheme import CacheRole, KVCacheSpec
from formats.checkpoint.kv_scales import ROLES
from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from formats.families.family import LatentAttention
from formats.families.registry import find_family
from formats.modeling.layers import attention_names
from inference.config import EngineConfig
from inference.models.model import KVHeads, ModelShape
from inference.models.parts import held_scales
from inference.scheduling.blocks import BlockChanges
from kernels.numerics import INT4, TYPES
from kernels.op_inputs import KV_BLOCK, KVPool
from kernels.packed_cache import feedback_of, turn_size, turned

if TYPE_CHECKING:
    from inference.backend import Backend

SINK_TYPE = torch.bfloat16  # of the K and V of sink tokens


@dataclass(frozen=True)
class LayerCache:
    """What a layer's cache has to hold.

    Attributes:
        heads: K and V of a token.
        scales: Static scales of K and V; None where there are none.
        spec: How K and V are quantized, or None.
        turn: Channels that are turned together in K; 0 for none.
        offset: What is subtracted from K, after its turn, fp32 [heads, D]; or None.
        feedback: Of keys that are rounded with feedback, fp32 [heads, D, D]; or None.
        sink_tokens: Tokens at the beginning of a sequence whose K and V are not quantized.
    """

    heads: KVHeads
    scales: tuple[Tensor, Tensor] | None = None
    spec: KVCacheSpec | None = None
    turn: int = 0
    offset: Tensor | None = None
    feedback: Tensor | None = None
    sink_tokens: int = 0

    def stored(self, role: CacheRole, dtype: torch.dtype) -> torch.dtype:
        """Element type of a pool of K or V, `dtype` where they are not quantized."""
        if self.spec is None:
            return dtype
        kind = TYPES[self.spec.dtype_of(role)]
        return torch.uint8 if kind is INT4 else kind.storage

    def size(self, role: CacheRole) -> int:
        """Elements of a head of K or V as it is stored: bytes, where two numbers share one."""
        size = self.heads.k_size if role == "k_cache" else self.heads.v_size
        return size // 2 if self.stored(role, torch.float32) == torch.uint8 else size

    @property
    def sink_bytes(self) -> int:
        """Bytes of the K and V of sink tokens beside a block."""
        heads = self.heads
        return self.sink_tokens * heads.count * (heads.k_size + heads.v_size) * SINK_TYPE.itemsize


@dataclass(frozen=True)
class CacheShape:
    """What a cache has to hold; how it is laid out in memory is the backend's.

    Attributes:
        blocks: Blocks of 64 tokens.
        layers: What is held of each layer, and how.
        dtype: Type of K and V where they are not quantized; None leaves it to the backend.
    """

    blocks: int
    layers: Sequence[LayerCache]
    dtype: torch.dtype | None = None

    @classmethod
    def of_model(
        cls,
        checkpoint: Checkpoint,
        model: ModelShape,
        sizes: EngineConfig,
        backend: Backend,
        *,
        quantized: bool,
    ) -> CacheShape:
        """The cache of a model, as a backend's kernels take it (`fitted`).

        Args:
            checkpoint: Says how each layer's is quantized, and has the static scales.
            model: The model's shape.
            sizes: The engine's sizes, all resolved.
            backend: Where it runs.
            quantized: Whether what the checkpoint says is done; else no layer's is quantized.

        Raises:
            EngineError: it quantizes latents otherwise than with static scales of 8 bits, or the
                checkpoint has scales of latents and the model caches none.
        """
        assert sizes.kv_blocks is not None
        layers = [LayerCache(heads) for heads in model.cached]
        if quantized:
            names = attention_names(checkpoint.config)
            layers = [
                _quantized(checkpoint, name, heads)
                for name, heads in zip(names, model.cached, strict=True)
            ]
        dtype = None if sizes.kv_dtype is None else getattr(torch, sizes.kv_dtype)
        return cls(sizes.kv_blocks, layers, dtype).fitted(backend)

    @property
    def quantized(self) -> bool:
        """Whether the cache of any layer is quantized."""
        return any(layer.spec is not None for layer in self.layers)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V in all layers, held in `dtype` where they are not quantized."""
        each = (
            own.heads.count * own.size(role) * own.stored(role, dtype).itemsize
            for own in self.layers
            for role in ROLES
        )
        return self.blocks * (KV_BLOCK * sum(each) + sum(own.sink_bytes for own in self.layers))

    def fitted(self, backend: Backend) -> CacheShape:
        """The same as kernels take it: with heads of their sizes, the numbers after their own 0."""
        layers = [
            own if backend.float_sinks(own.heads) else replace(own, sink_tokens=0)
            for own in (_fitted(layer, backend.head_sizes) for layer in self.layers)
        ]
        return replace(self, layers=layers)

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tokens_last: bool,
        dynamic_scales: torch.dtype,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> list[KVPool]:
        """A pool of zeros for each layer.

        Args:
            dtype: Of K and V where they are not quantized.
            tokens_last: Whether values lie as [blocks, Hkv, D, 64], not as [blocks, Hkv, 64, D];
                latents, which are keys too, never do.
            dynamic_scales: Type of scales that are taken from the data.
            zeros: Makes K and V.
        """
        pools = []
        for layer in self.layers:
            heads, spec = layer.heads, layer.spec
            places = (self.blocks, heads.count, KV_BLOCK)
            own = (KV_BLOCK, layer.size("v_cache"))
            own = own[:: -1 if tokens_last and not heads.latent else 1]
            shapes = ((*places, layer.size("k_cache")), (*places[:2], *own))
            k, v = (
                zeros(shape, dtype=layer.stored(role, dtype), device=device)
                for role, shape in zip(ROLES, shapes, strict=True)
            )
            offset, feedback = (
                None if x is None else x.to(device).contiguous()
                for x in (layer.offset, layer.feedback)
            )
            turned_so: dict[str, Any] = {"turn": layer.turn, "k_offset": offset}
            turned_so["k_feedback"] = feedback
            if layer.sink_tokens:
                for name, size in (("sink_k", heads.k_size), ("sink_v", heads.v_size)):
                    shape = (self.blocks, heads.count, layer.sink_tokens, size)
                    turned_so[name] = torch.zeros(shape, dtype=SINK_TYPE, device=device)
            if spec is None:
                pools.append(KVPool(k, v))
            elif spec.dynamic:
                kind = torch.float16 if spec.packed else dynamic_scales
                k_scale, v_scale = (torch.ones(places, dtype=kind, device=device) for _ in "kv")
                pools.append(KVPool(k, v, k_scale, v_scale, dynamic=True, **turned_so))
            else:
                assert layer.scales is not None  # one scale for all heads is a view: contiguous
                k_scale, v_scale = (scale.to(device).contiguous() for scale in layer.scales)
                pools.append(KVPool(k, v, k_scale, v_scale, **turned_so))
        return pools


def _quantized(checkpoint: Checkpoint, name: str, heads: KVHeads) -> LayerCache:
    """The cache of an attention module as its checkpoint quantizes it."""
    spec = checkpoint.kv_scheme_of(name)
    if spec is None:
        return LayerCache(heads)
    if heads.latent and (spec.dynamic or spec.packed or spec.rotate_keys):
        raise EngineError(
            f"the cache of the checkpoint is {spec.text}; one of latents has static scales of 8 "
            "bits alone. Quantize it with dtype int8 and granularity per_head, or run it with "
            "quantized_kv=False"
        )
    sizes = (heads.k_size, heads.v_size)
    if any(spec.bits_of(r) == 4 and size % 2 for r, size in zip(ROLES, sizes, strict=True)):
        raise EngineError(
            f"heads of {sizes[0]} (K) and {sizes[1]} (V) numbers do not lie two in a byte, as a "
            f"cache of {spec.text} does. Run it with quantized_kv=False"
        )
    own = LayerCache(
        heads,
        spec=spec,
        turn=turn_size(heads.k_size) if spec.rotate_keys else 0,
        sink_tokens=checkpoint.sinks.tokens,
    )
    if spec.center_keys:
        offset = checkpoint.kv_offsets[name]
        offset = offset if heads.channels is None else offset[:, heads.channels]
        own = replace(own, offset=turned(offset, own.turn) if own.turn else offset)
    if spec.compensate_keys:
        moments = checkpoint.query_moments[name]
        if heads.channels is not None:
            moments = moments[:, heads.channels][:, :, heads.channels]
        try:
            own = replace(own, feedback=feedback_of(moments, own.turn))
        except RuntimeError as error:
            raise EngineError(
                f"{name}.q_moments are not those of queries ({error}). Copy the checkpoint again "
                "or write it again"
            ) from error
    if spec.dynamic:
        return own
    family = find_family(checkpoint.config)
    if not heads.latent and family is not None and isinstance(family.attention, LatentAttention):
        raise EngineError(
            "the checkpoint has static scales of latents, and transformers' own code caches K and "
            "V instead. Run it without transformers_code, or with quantized_kv=False"
        )
    return replace(own, scales=held_scales(checkpoint.kv_scales[name], heads.channels))


def _fitted(layer: LayerCache, sizes: Callable[[int, int], tuple[int, int]]) -> LayerCache:
    heads, scales = layer.heads, layer.scales
    if heads.latent:  # its kernels take any size, and a scale of each number
        if scales is None:
            return layer
        k, v = (scale.reshape(1, -1) for scale in scales)
        return replace(layer, scales=(k.expand(1, heads.k_size), v.expand(1, heads.v_size)))
    wider = replace(layer, heads=KVHeads(heads.count, *sizes(heads.k_size, heads.v_size)))
    added = wider.heads.k_size - heads.k_size
    if layer.offset is not None:
        wider = replace(wider, offset=torch.nn.functional.pad(layer.offset, (0, added)))
    if layer.feedback is not None:
        feedback = torch.nn.functional.pad(layer.feedback, (0, added, 0, added))
        wider = replace(wider, feedback=feedback)
    if scales is not None and scales[0].dim() > 1:  # of each channel of K
        scales = torch.nn.functional.pad(scales[0], (0, added), value=1.0), scales[1]
    return replace(wider, scales=scales)


def change_blocks(pools: Sequence[KVPool], changes: BlockChanges) -> None:
    """Do what the next step needs done to the cache; on a GPU after the steps on their way."""
    copy_blocks(pools, changes.copies)
    clear_blocks(pools, changes.clears)


def copy_blocks(pools: Sequence[KVPool], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy K and V of blocks, and the scales of their tokens, from first to second of each pair.

    All are read before one is written.
    """
    if not pairs or not pools:
        return
    sources, targets = torch.tensor(pairs, device=pools[0].k.device).T
    for pool in pools:
        own = (pool.k_scale, pool.v_scale) if pool.dynamic else ()
        for tensor in (pool.k, pool.v, *own, pool.sink_k, pool.sink_v):
            if tensor is not None:
                numbers = tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)
                numbers[targets] = numbers[sources]


def clear_blocks(pools: Sequence[KVPool], blocks: Sequence[int]) -> None:
    """Clear blocks of what may be NaN or infinite: V of floats, also of sink tokens.

    Kernels read whole blocks, and multiply by 0 what there is after a sequence's last token.
    """
    floats = [pool.v for pool in pools if pool.v_scale is None]
    floats += [pool.sink_v for pool in pools if pool.sink_v is not None]
    if blocks and floats:
        index = torch.tensor(blocks, device=floats[0].device)
        for v in floats:
            v.index_fill_(0, index, 0)


class OneProcess:
    """What is alike in backends whose models no other process runs a part of; see
    `inference.backend.Backend`."""

    change_blocks = staticmethod(change_blocks)

    def check_alive(self) -> None:
        """No other process is needed."""

    def close(self) -> None:
        """No other process is to end."""
