"""A rank's part of a decoder: how it is loaded, and its layers, which communicate with other ranks.

Ranks meet (rendezvous), then each loads its weights. It has fewer heads, and layers are

    column-parallel   some of the outputs, of all inputs: a device's own layer, no communication
    row-parallel      some of the inputs; an all-reduce adds the partial sums
    gathered          some of the outputs, of inputs that the ranks have parts of
    head              the logits of some tokens, which rank 0 gathers

How partial sums are added is a device's own: `inference.parallel.cpu`, `inference.parallel.gpu`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, TCPStore

from formats.checkpoint.part import Span, checkpoint_part
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, HEAD
from inference.backend import Backend, Loop
from inference.models.adapters import CachedTokens
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear
from inference.parallel.communication import LOADING, GlooGroup, Group, Progress, RankSpec, Task
from inference.parallel.ranks import Ranks
from inference.parallel.shard import Shard, shard_of
from inference.scheduling.active import ActiveRequests
from inference.transformers_code.model import Shape, read_shape
from kernels.op_inputs import KVPool


class ShardDecoder(Decoder[L, X]):
    """A rank's part of a decoder; see `inference.models.decoder.Decoder`.

    Args:
        checkpoint: The whole.
        shard: What the rank holds of it.
        group: All ranks.
        longest: Most tokens that a request may have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: Shard,
        factory: LayerFactory[L, X],
        group: Group,
        longest: int,
    ) -> None:
        self._own, self._group = shard.vocabulary[shard.rank], group
        part = checkpoint_part(checkpoint, shard.cuts, shard.vectors)
        super().__init__(part, factory, longest, shard.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states before the first block: each token's come from the rank that has it."""
        rows = ids - self._own.first
        elsewhere = (rows < 0) | (rows >= self._own.count)
        found = super().embed(rows.clamp(0, self._own.count - 1))
        return self._group.sum(found.masked_fill(elsewhere[:, None], 0))


@dataclass(frozen=True)
class RankLayer:
    """A layer of which each rank has a part; see `inference.models.layers.LinearLayer`.

    Attributes:
        own: The rank's part, a layer of its device.
    """

    own: Any

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    @property
    def quantized(self) -> bool:
        """Whether its weight is."""
        return self.own.quantized

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as stored in memory."""
        return self.own.gathers

    @property
    def matrix(self) -> Tensor | None:
        """The rank's weight, where it is stored as a matrix."""
        return self.own.matrix

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the rank's weight as floats, by their index in it."""
        return self.own.gather(ids, dtype)

    def with_own(self, change: Callable[[Any], Any]) -> Self:
        """The same layer with another part of this rank."""
        return replace(self, own=change(self.own))


@dataclass(frozen=True)
class Gathered(RankLayer):
    """A layer of which each rank has some outputs, and whose inputs the ranks have parts of.

    Attributes:
        inputs: Inputs of each rank.
        outputs: Outputs of each rank.
        group: All ranks.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None, *dtype: torch.dtype) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in `dtype`, by default the type of `x`."""
        y = self.own(self.group.side_by_side(x, self.inputs), sinks, *dtype)
        return self.group.side_by_side(y, self.outputs)


@dataclass(frozen=True)
class Head(RankLayer):
    """The head of a rank: the logits of its tokens, which the first rank puts together.

    Attributes:
        tokens: Tokens of each rank.
        group: All ranks.
    """

    tokens: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[R, H] float -> fp32 [R, vocabulary] on the first rank; on others their own tokens'."""
        return self.group.on_first(self.own(x, sinks).float(), self.tokens)


class RankFactory(ABC):
    """Makes a rank's layers; see `inference.models.layers.LayerFactory`.

    Args:
        inner: The backend of the rank's device.
        shard: What the rank holds.
        group: All ranks.
        check: Raises where another rank has failed.
    """

    def __init__(self, inner: Backend, shard: Shard, group: Any, check: Callable[[], None]) -> None:
        self._inner, self._shard, self._group, self._check = inner, shard, group, check
        self.device, self.dtype = inner.device, inner.dtype
        self.same_bits, self.check = inner.same_bits, inner.check
        self.functions = inner.functions

    def linear(self, stored: StoredLinear) -> Any:
        """Pack a layer, as the rank has it."""
        self._check()
        self._group.progress.count += 1
        shard, module = self._shard, stored.names[0][0]
        if module in (HEAD, EMBEDDING):
            tokens = [span.count for span in shard.vocabulary]
            return self.head(self._inner.linear(stored), tokens)
        if module in shard.gathered:
            inputs, outputs = ([span.count for span in own] for own in shard.gathered[module])
            return self.gathered(self._inner.linear(stored), inputs, outputs)
        cut = shard.cuts.get(module)
        if cut is not None and cut.columns is not None:
            return self.row_parallel(stored)
        return self._inner.linear(stored)

    def head(self, own: Any, tokens: Sequence[int]) -> Head:
        """The head, of which the rank has so many tokens."""
        return Head(own, tokens, self._group)

    def gathered(self, own: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Gathered:
        """A layer that reads the inputs of all ranks."""
        return Gathered(own, inputs, outputs, self._group)

    @abstractmethod
    def row_parallel(self, stored: StoredLinear) -> RankLayer:
        """Pack the rank's part of a layer of which each has some inputs."""

    @abstractmethod
    def experts(self, stacks: Iterator[StoredLinear], count: int) -> Any:
        """Pack the same layer of each expert."""


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
