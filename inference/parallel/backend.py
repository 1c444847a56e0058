"""The backend of an engine on several ranks: what it is asked for, all of them do.

The first rank has the engine with its scheduler, its sampler and its requests; the others
(`inference.parallel.worker`) hold parts of the weights and of the cache, and run the steps that it
plans. What the ranks tell each other within a step goes through a `Group`.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from formats.checkpoint.part import Span
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.backend import Backend, choose_backend
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.cpu.batch import Batch
from inference.cpu.decoder import CpuDecoder, forward_by_ops
from inference.cpu.loop import HostLoop
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.model import Model
from inference.models.read import StoredLinear
from inference.parallel.decoder import CpuFactory, ShardDecoder, check_whole
from inference.parallel.group import GlooGroup, Group, Progress
from inference.parallel.messages import (
    ChangeBlocks,
    MakeCache,
    RankSpec,
    RunStep,
    TellFree,
    packed,
)
from inference.parallel.ranks import RankProcess, Ranks, Start
from inference.parallel.shard import Shard, shard_of
from inference.scheduling.active import ActiveRequests
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.scheduler import Scheduler
from inference.transformers_code.choose import Shape, read_shape
from kernels.attention_inputs import KVPool

MEETING = "meeting the other ranks"
SOON = timedelta(seconds=30)  # in which ranks that have all come find each other
LONG = timedelta(hours=1)  # for the first one to come, with whose end all others end


def join(spec: RankSpec, progress: Progress) -> GlooGroup:
    """Meet the other ranks; the first comes when all others have."""
    progress.doing = MEETING
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    store = FileStore(spec.meeting, spec.ranks)
    store.set_timeout(LONG if spec.rank else SOON)
    group = GlooGroup(gloo(store, spec.rank, spec.ranks, options))
    group.progress = progress
    group.smallest(0)
    progress.doing = "loading its part of the model"
    return group


@dataclass
class RankLoader:
    """What a rank loads, and what runs it.

    Attributes:
        inner: The backend of its device.
        checkpoint: The whole checkpoint.
        shape: The whole model's shape.
        shard: What the rank holds.
        group: All ranks.
        config: The engine's sizes.
        check: Raises where another rank has failed.
    """

    inner: CpuBackend
    checkpoint: Checkpoint
    shape: ModelConfig
    shard: Shard
    group: Group
    config: EngineConfig
    check: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, spec: RankSpec, group: Group) -> RankLoader:
        """Of a rank but the first."""
        torch.set_num_threads(spec.threads)
        checkpoint = spec.open()
        inner = choose_backend(spec.device, checkpoint, spec.dtype)
        assert isinstance(inner, CpuBackend)
        shape = declared_shape(read_shape(checkpoint, inner))
        shard = shard_of(checkpoint, shape, spec.rank, spec.ranks)
        return cls(inner, checkpoint, shape, shard, group, spec.config)

    def load(self) -> ShardDecoder[Any, Any]:
        """Load the rank's part of the model."""
        factory = CpuFactory(self.inner.dtype, self.shard, self.group, self.check)
        assert self.config.max_model_len is not None
        self.model = ShardDecoder(
            self.checkpoint, self.shard, factory, self.group, self.config.max_model_len
        )
        return self.model

    def cache_shape(self, *, quantized: bool) -> CacheShape:
        """The rank's part of the cache, without its number of blocks."""
        sizes = self.config.model_copy(update={"kv_blocks": 1})
        whole = CacheShape.of_model(self.checkpoint, self.shape, sizes, quantized=quantized)
        return cut_cache(whole.fitted(self.inner.head_sizes), self.shard.heads)

    def forward(self, pools: Sequence[KVPool]) -> Callable[[Batch], Tensor]:
        """What runs the steps of the rank's part on its cache."""
        return partial(forward_by_ops, cast(CpuDecoder, self.model), pools)

    def free_bytes(self) -> int:
        """Memory that the whole cache could have if all ranks had what this one has."""
        free = self.inner.free_bytes() // self.group.ranks  # they share one machine's
        return free * self.shape.kv_heads // self.shard.heads.count


class FirstBackend:
    """The first rank's, which starts the others; see `inference.backend.Backend`.

    Args:
        inner: The backend of its device.
        open: Opens the checkpoint.
        config: The engine's sizes.
        start: Starts a rank.
    """

    runs_drafters = False

    def __init__(
        self,
        inner: CpuBackend,
        open: Callable[[], Checkpoint],
        config: EngineConfig,
        start: Start = RankProcess,
    ) -> None:
        self._inner, self._open, self._config, self._start = inner, open, config, start
        self.device, self.dtype = inner.device, inner.dtype

    def check(self, config: ModelConfig) -> None:
        """Refuse what the device does not run."""
        self._inner.check(config)

    def loading(self, nbytes: int) -> AbstractContextManager[object]:
        """Tell where memory runs out while weights are loaded."""
        return self._inner.loading(nbytes // self._config.tensor_parallel)

    def linear(self, stored: StoredLinear) -> Any:
        """A layer that this rank runs alone."""
        return self._inner.linear(stored)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> Any:
        """Experts that this rank runs alone."""
        return self._inner.experts(stacks, count)

    def load(self, checkpoint: Checkpoint, shape: Shape, longest: int) -> Model:
        """Start the other ranks, and load this one's part of the model beside them.

        Raises:
            CheckpointError: the model cannot be cut so, or is damaged.
            EngineError: a rank failed.
        """
        ranks, whole = self._config.tensor_parallel, declared_shape(shape)
        check_whole(checkpoint, whole)
        shard = shard_of(checkpoint, whole, 0, ranks)
        config = self._config.model_copy(update={"max_model_len": longest})
        progress, before = Progress(), torch.get_num_threads()
        with tempfile.TemporaryDirectory(prefix="ptq-ranks-") as folder:
            first = RankSpec(
                rank=0,
                ranks=ranks,
                open=self._open,
                config=config,
                device=str(self.device),
                dtype=self.dtype,
                meeting=str(Path(folder) / "meeting"),
                threads=max(1, before // ranks),
            )
            specs = [replace(first, rank=rank) for rank in range(1, ranks)]
            self.ranks = Ranks(specs, progress, self._start, config.rank_patience_s)
            self._end = weakref.finalize(self, _end, self.ranks, before)
            torch.set_num_threads(first.threads)
            try:
                with self.ranks.together("loading its part of the model"):
                    self.ranks.wait_for(MEETING)
                    group = join(first, progress)
                    self._loader = RankLoader(
                        self._inner, checkpoint, whole, shard, group, config, self.ranks.check
                    )
                    model = self._loader.load()
                    group.smallest(0)  # all have
            except BaseException:
                self.close()
                raise
        return model

    def head_sizes(self, k: int, v: int) -> tuple[int, int]:
        """Sizes of heads in the cache."""
        return self._inner.head_sizes(k, v)

    def free_bytes(self) -> int:
        """Memory that the whole cache could have: where there is the least, counts."""
        with self.ranks.together("telling how much memory is free"):
            self.ranks.send(TellFree())
            return self._loader.group.smallest(self._loader.free_bytes())

    def cache(self, shape: CacheShape) -> list[KVPool]:
        """Allocate a cache, on each rank its part of each layer."""
        with self.ranks.together("allocating the cache"):
            self.ranks.send(MakeCache(shape.blocks, shape.quantized))
            own = self._loader.cache_shape(quantized=shape.quantized)
            return self._inner.cache(replace(own, blocks=shape.blocks))

    def change_blocks(self, pools: Sequence[KVPool], changes: BlockChanges) -> None:
        """Do what the next step needs done to the cache."""
        if changes.copies or changes.clears:
            self.ranks.send(ChangeBlocks(list(changes.copies), list(changes.clears)))
            self._inner.change_blocks(pools, changes)

    def loop(
        self,
        model: Any,
        pools: Sequence[KVPool],
        scheduler: Scheduler,
        sizes: EngineConfig,
        requests: ActiveRequests,
    ) -> HostLoop:
        """The steps of an engine.

        Raises:
            EngineError: the model or the cache is another than the ranks have.
        """
        if model is not self._loader.model:
            raise EngineError(
                "tensor_parallel: the ranks have the blocks that were loaded, and no others"
            )
        return HostLoop(partial(self._step, self._loader.forward(pools)), scheduler, requests)

    def _step(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Run a step on all ranks: logits of the rows wanted."""
        with self.ranks.together(f"running a step of {len(batch.ids)} tokens"):
            self.ranks.send(RunStep(packed(batch)))
            return forward(batch)

    def ran_out(self, error: Exception) -> bool:
        """Where memory runs out amid a step, the ranks have ended."""
        return False

    def check_alive(self) -> None:
        """Raise EngineEndedError where a rank has failed."""
        self.ranks.check()

    def close(self) -> None:
        """End the other ranks."""
        self._end()

    def peak_bytes(self) -> int:
        """Most memory that this rank has held so far."""
        return self._inner.peak_bytes()


def choose_ranks(
    backend: Backend[Any, Any], open: Callable[[], Checkpoint], config: EngineConfig
) -> Backend[Any, Any]:
    """A backend that runs a model on as many ranks as the sizes say.

    Args:
        backend: Of the first rank's device.
        open: Opens the checkpoint; can be pickled.
        config: The engine's sizes.

    Raises:
        EngineError: there are several, and the device or another size does not go with that.
    """
    if config.tensor_parallel == 1:
        return backend
    if not isinstance(backend, CpuBackend):
        raise EngineError("tensor_parallel: found device cuda; it runs on a CPU")
    if config.transformers_code:
        raise EngineError(
            "tensor_parallel: transformers' own code is not cut among ranks; leave "
            "transformers_code out, or take tensor_parallel 1"
        )
    return FirstBackend(backend, open, config)


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
    )


def _end(ranks: Ranks, threads: int) -> None:
    """End ranks, and give their threads back to this process."""
    ranks.close()
    with suppress(RuntimeError):
        torch.set_num_threads(threads)
