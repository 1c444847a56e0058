"""How any rank meets the others and loads its part of the model (rendezvous, then weights)."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from formats.checkpoint.part import Span
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.backend import Backend, Loop
from inference.models.adapters import CachedTokens
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.layers import LayerFactory
from inference.parallel.group import GlooGroup, Group, Progress
from inference.parallel.layers import ShardDecoder
from inference.parallel.messages import LOADING, RankSpec, Task
from inference.parallel.ranks import Ranks
from inference.parallel.shard import shard_of
from inference.scheduling.active import ActiveRequests
from inference.transformers_code.model import Shape, read_shape
from kernels.op_inputs import KVPool

MEETING = "meeting the other ranks"
LOOPBACK = "127.0.0.1"
PORTS = 1 << 16
SOON = timedelta(seconds=30)  # that rank 0 waits: it begins when all others have come
LONG = timedelta(hours=1)  # that others wait for rank 0, with whose end they end


def join(spec: RankSpec, progress: Progress) -> GlooGroup:
    """Meet the other ranks (rendezvous); rank 0 comes when all others have."""
    progress.doing = MEETING
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    store = FileStore(spec.meeting, spec.ranks)
    store.set_timeout(LONG if spec.rank else SOON)
    group = GlooGroup(gloo(store, spec.rank, spec.ranks, options))
    group.progress = progress
    group.smallest(0)
    progress.doing = LOADING
    return group


def device_store(host: GlooGroup) -> TCPStore:
    """Where the ranks' NCCL meets: in rank 0, on a port of the loopback interface.

    NCCL's monitor reads it once a second as long as the group exists, which outlives the engine's
    folder: a `FileStore` in there has it wait for a file that is gone, and the group's end for it,
    for minutes.
    """
    if host.rank:
        return TCPStore(LOOPBACK, host.smallest(PORTS), host.ranks, wait_for_workers=False)
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        host.ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    host.smallest(port)
    return store


class RankLoader(ABC):
    """What a rank loads and runs; how, depends on the kind of its device.

    Args:
        spec: What it runs.

    Attributes:
        inner: The backend of its device.
        checkpoint: The whole checkpoint.
        shape: The whole model's shape.
        shard: What the rank holds.
        host: The group of the processes, which has met.
        group: The group of the layers of a step.
        config: The engine's sizes.
    """

    def __init__(
        self, spec: RankSpec, checkpoint: Checkpoint, inner: Backend, host: GlooGroup
    ) -> None:
        self.inner, self.checkpoint, self.host, self.config = inner, checkpoint, host, spec.config
        self.shape = declared_shape(read_shape(checkpoint, inner))
        self.shard = shard_of(checkpoint, self.shape, spec.rank, spec.ranks)
        self.group = self.join()

    @abstractmethod
    def join(self) -> Group:
        """The group of the layers of a step."""

    @abstractmethod
    def factory(self, check: Callable[[], None]) -> LayerFactory[Any, Any]:
        """Makes the rank's layers; `check` as of `load`."""

    @abstractmethod
    def executor(self, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        """What runs the steps that the first rank plans, on another one."""

    @abstractmethod
    def loop(self, pools: Sequence[KVPool], ranks: Ranks, requests: ActiveRequests) -> Loop:
        """The steps of an engine, on all ranks: what the first one runs.

        Args:
            pools: Its part of the cache.
            ranks: The others.
            requests: Those that live, and what schedules them.
        """

    def load(self, check: Callable[[], None] = lambda: None) -> ShardDecoder[Any, Any]:
        """Load the rank's part of the model, and wait until all ranks have.

        Args:
            check: Raises where another rank has failed.
        """
        assert self.config.max_model_len is not None
        self.model: ShardDecoder[Any, Any] = ShardDecoder(
            self.checkpoint, self.shard, self.factory(check), self.group, self.config.max_model_len
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

    def own_free_bytes(self) -> int:
        """Memory that the rank's part of a cache could have."""
        return self.inner.free_bytes()

    def free_bytes(self) -> int:
        """Memory that the whole cache could have if all ranks had what this one has."""
        free = self.own_free_bytes()
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
