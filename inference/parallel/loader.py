"""How any rank meets the others and loads its part of the model (rendezvous, then weights)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from formats.checkpoint.part import Span
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.backend import Backend, Loop
from inference.config import EngineConfig
from inference.models.adapters import CachedTokens
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.layers import LayerFactory
from inference.parallel.group import GlooGroup, Group, Progress
from inference.parallel.layers import ShardDecoder
from inference.parallel.messages import LOADING, RankSpec, Task
from inference.parallel.ranks import Ranks
from inference.parallel.shard import Shard, shard_of
from inference.transformers_code.model import Shape, read_shape
from kernels.attention_inputs import KVPool

MEETING = "meeting the other ranks"
SOON = timedelta(seconds=30)  # that rank 0 waits: it begins when all others have come
LONG = timedelta(hours=1)  # that others wait for rank 0, with whose end they end


def join(spec: RankSpec, progress: Progress) -> GlooGroup:
    """Meet the other ranks (rendezvous); rank 0 comes when all others have."""
    progress.doing = MEETING
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    store = FileStore(spec.meeting, spec.ranks)
    store.set_timeout(LONG if spec.rank else SOON)
    group = GlooGroup(gloo(store, spec.rank, spec.ranks, options))
    group.progress = progress
    group.smallest(0)
    progress.doing = LOADING
    return group


class DeviceSide(Protocol):
    """What a rank does in its own way on each kind of device: CPU or GPU."""

    def join(self, inner: Backend, spec: RankSpec, host: GlooGroup, hidden: int) -> Group:
        """The group of the layers of a step, for rows of so many elements.

        Args:
            inner: The backend of the rank's device.
            spec: What the rank runs.
            host: The group of the processes.
            hidden: Elements of a row of the residual stream.
        """
        ...

    def factory(
        self, inner: Backend, shard: Shard, group: Group, check: Callable[[], None]
    ) -> LayerFactory[Any, Any]:
        """Makes the rank's layers."""
        ...

    def free_bytes(self, inner: Backend, ranks: int) -> int:
        """Memory that the rank's part of a cache could have."""
        ...

    def executor(self, loader: RankLoader, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        """What runs the steps that the first rank plans, on another one."""
        ...

    def loop(self, loader: RankLoader, pools: Sequence[KVPool], ranks: Ranks, **rest: Any) -> Loop:
        """The steps of an engine, on all ranks.

        Args:
            loader: Of the first rank.
            pools: Its part of the cache.
            ranks: The others.
            rest: Scheduler, sizes and requests of the engine.
        """
        ...


@dataclass
class RankLoader:
    """What a rank loads.

    Attributes:
        inner: The backend of its device.
        side: What depends on the kind of that.
        checkpoint: The whole checkpoint.
        shape: The whole model's shape.
        shard: What the rank holds.
        host: The group of the processes.
        group: The group of the layers of a step.
        config: The engine's sizes.
    """

    inner: Backend
    side: DeviceSide
    checkpoint: Checkpoint
    shape: ModelConfig
    shard: Shard
    host: GlooGroup
    group: Group
    config: EngineConfig

    @classmethod
    def of(
        cls,
        spec: RankSpec,
        checkpoint: Checkpoint,
        inner: Backend,
        side: DeviceSide,
        host: GlooGroup,
    ) -> RankLoader:
        """Of a rank that has met the others."""
        shape = declared_shape(read_shape(checkpoint, inner))
        shard = shard_of(checkpoint, shape, spec.rank, spec.ranks)
        group = side.join(inner, spec, host, shape.hidden_size)
        return cls(inner, side, checkpoint, shape, shard, host, group, spec.config)

    def load(self, check: Callable[[], None] = lambda: None) -> ShardDecoder[Any, Any]:
        """Load the rank's part of the model, and wait until all ranks have.

        Args:
            check: Raises where another rank has failed.
        """
        factory = self.side.factory(self.inner, self.shard, self.group, check)
        assert self.config.max_model_len is not None
        self.model = ShardDecoder(
            self.checkpoint, self.shard, factory, self.group, self.config.max_model_len
        )
        self.host.smallest(0)
        return self.model

    def cache_shape(self, *, blocks: int, quantized: bool) -> CacheShape:
        """The rank's part of a cache."""
        sizes = self.config.model_copy(update={"kv_blocks": blocks})
        own = (self.checkpoint, self.shape, sizes, self.inner)
        return cut_cache(CacheShape.of_model(*own, quantized=quantized), self.shard.heads)

    def cut_tokens(self, tokens: CachedTokens) -> CachedTokens:
        """What the rank's cache takes of K and V of all heads."""
        own = self.shard.heads.slice
        keys, values = tokens.keys[:, :, own], tokens.values[:, :, own]
        return tokens._replace(keys=keys.contiguous(), values=values.contiguous())

    def free_bytes(self) -> int:
        """Memory that the whole cache could have if all ranks had what this one has."""
        free = self.side.free_bytes(self.inner, self.host.ranks)
        return self.host.smallest(free * self.shape.kv_heads // self.shard.heads.count)


def declared_shape(shape: Shape) -> ModelConfig:
    """The shape of a model that a family declares.

    Raises:
        CheckpointError: transformers' own code runs it.
    """
    if not isinstance(shape, ModelConfig):
        raise CheckpointError(
            "tensor_parallel: no family declares this model, and transformers' own code is not cut "
            "among ranks. Run it with tensor_parallel 1"
        )
    return shape


def cut_cache(whole: CacheShape, heads: Span) -> CacheShape:
    """Some heads of a cache."""
    return replace(whole, layers=[_cut(layer, heads) for layer in whole.layers])


def _cut(layer: LayerCache, heads: Span) -> LayerCache:
    own = heads.slice
    return replace(
        layer,
        heads=replace(layer.heads, count=heads.count),
        scales=None if layer.scales is None else (layer.scales[0][own], layer.scales[1][own]),
        offset=None if layer.offset is None else layer.offset[own],
        feedback=None if layer.feedback is None else layer.feedback[own],
    )
