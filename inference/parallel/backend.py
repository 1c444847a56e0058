"""The backend of an engine on several ranks: it has all of them do what the engine asks for.

Rank 0, the first, has the engine with its scheduler, its sampler and its requests; the others
(`inference.parallel.worker`) hold parts of the weights and of the cache, and run the steps that it
plans. Within a step the ranks communicate by a `Group`'s collectives.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.backend import Backend, Loop
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.models.adapters import CachedTokens
from inference.models.decoder import check_shapes
from inference.models.kv_cache import CacheShape
from inference.models.model import Model
from inference.parallel.communication import LOADING, MakeCache, Progress, RankSpec, TellFree
from inference.parallel.cpu import CpuLoader
from inference.parallel.part import MEETING, RankLoader, declared_shape, join
from inference.parallel.ranks import RankProcess, Ranks, Start
from inference.parallel.shard import shard_of
from inference.parallel.worker import TorchrunStart, run_rank, torchrun_place
from inference.scheduling.active import ActiveRequests
from inference.scheduling.blocks import BlockChanges
from inference.transformers_code.model import Shape
from kernels.op_inputs import KVPool

ABORTED_WITHIN = 10.0  # seconds
STUCK_AFTER = 3.0  # seconds in which what a GPU waits for ends once a rank is gone
log = logging.getLogger("ptq.inference")
MakeBackend = Callable[[int], Backend]


class FirstBackend:
    """The backend of rank 0, which starts the others; see `inference.backend.Backend`.

    Args:
        inner: The backend of its device.
        open: Opens the checkpoint; can be pickled.
        config: The engine's sizes.
        others: Makes the backend of another rank; can be pickled.
        start: Starts a rank.
        loader: Gives the kind of a rank's loader for the backend of its device; can be pickled.
    """

    runs_drafters = False

    def __init__(
        self,
        inner: Backend,
        open: Callable[[], Checkpoint],
        config: EngineConfig,
        others: MakeBackend,
        *,
        start: Start = RankProcess,
        loader: Callable[[Backend], type[RankLoader]] | None = None,
    ) -> None:
        self._inner, self._config, self._start = inner, config, start
        self.device, self.dtype = inner.device, inner.dtype
        self.same_bits, self.functions = inner.same_bits, inner.functions
        # As on one device: these are of this rank alone.
        self.check, self.linear, self.experts = inner.check, inner.linear, inner.experts
        self.float_sinks, self.head_sizes = inner.float_sinks, inner.head_sizes
        self.peak_bytes = inner.peak_bytes
        ranks, own = config.tensor_parallel, loader or loader_of
        self._first = RankSpec(0, ranks, open, config, others, "", 1, own)

    def loading(self, nbytes: int) -> AbstractContextManager[object]:
        """Tell where memory runs out while weights are loaded."""
        return self._inner.loading(nbytes // self._config.tensor_parallel)

    def load(self, checkpoint: Checkpoint, shape: Shape, longest: int) -> Model:
        """Start the other ranks, and load this one's part of the model beside them.

        Raises:
            CheckpointError: the model cannot be cut so, or is damaged.
            EngineError: a rank failed.
        """
        ranks, whole = self._config.tensor_parallel, declared_shape(shape)
        check_shapes(checkpoint, whole)
        shard_of(checkpoint, whole, 0, ranks)  # before anything is started
        progress, before = Progress(), torch.get_num_threads()
        folder = tempfile.mkdtemp(prefix="ptq-ranks-")
        first = replace(
            self._first,
            config=self._config.model_copy(update={"max_model_len": longest}),
            meeting=str(Path(folder) / "meeting"),
            threads=max(1, before // ranks),
        )
        specs = [replace(first, rank=rank) for rank in range(1, ranks)]
        patience, devices = self._config.rank_patience_s, self.device.type != "cpu"
        stuck = STUCK_AFTER if devices else None
        self.ranks = Ranks(specs, progress, self._start, patience, stuck)
        self._end = weakref.finalize(self, _end, self.ranks, before, folder, devices)
        torch.set_num_threads(first.threads)
        try:
            with self.ranks.together(LOADING):
                self.ranks.wait_for(MEETING)
                host, kind = join(first, progress), first.loader(self._inner)
                self._loader: RankLoader = kind(first, checkpoint, self._inner, host)
                return self._loader.load(self.ranks.check)
        except BaseException:
            self.close()
            raise

    def free_bytes(self) -> int:
        """Memory that the whole cache could have; the rank with the least decides."""
        with self.ranks.together("telling how much memory is free"):
            self.ranks.send(TellFree())
            return self._loader.free_bytes()

    def cache(self, shape: CacheShape) -> list[KVPool]:
        """Allocate a cache, on each rank its part of each layer."""
        with self.ranks.together("allocating the cache"):
            self.ranks.send(MakeCache(shape.blocks, shape.quantized))
            own = self._loader.cache_shape(blocks=shape.blocks, quantized=shape.quantized)
            return self._inner.cache(own)

    def change_blocks(self, pools: Sequence[KVPool], changes: BlockChanges) -> None:
        """Do what the next step needs done to the cache."""
        if changes.copies or changes.clears:
            self.ranks.send(BlockChanges(list(changes.copies), list(changes.clears)))
            self._inner.change_blocks(pools, changes)

    def write_kv(self, pools: Sequence[KVPool], tokens: CachedTokens) -> None:
        """Put K and V that no step computes into the cache, on each rank those of its heads."""
        self.ranks.send(tokens)
        self._inner.write_kv(pools, self._loader.cut_tokens(tokens))

    def loop(
        self, model: Any, pools: Sequence[KVPool], sizes: EngineConfig, requests: ActiveRequests
    ) -> Loop:
        """The steps of an engine.

        Raises:
            EngineError: the model or the cache is another than the ranks have.
        """
        if model is not self._loader.model:
            raise EngineError(
                "tensor_parallel: the ranks have the blocks that were loaded, and no others"
            )
        return self._loader.loop(pools, self.ranks, requests)

    def ran_out(self, error: Exception) -> bool:
        """Where memory runs out amid a step, the ranks have ended."""
        return False

    def check_alive(self) -> None:
        """Raise EngineEndedError where a rank has failed."""
        self.ranks.check()

    def close(self) -> None:
        """End the other ranks."""
        self._end()


def choose_ranks(backend: Backend, open: Callable[[], Checkpoint], config: EngineConfig) -> Backend:
    """A backend that runs a model on as many ranks as the sizes say.

    Args:
        backend: Of the first rank's device.
        open: Opens the checkpoint; can be pickled.
        config: The engine's sizes.

    Raises:
        EngineError: there are several, and the device or another size does not go with that.
    """
    ranks, kind = config.tensor_parallel, backend.device.type
    if ranks == 1:
        return backend
    size = f"tensor_parallel {ranks}"
    if config.transformers_code:
        raise EngineError(
            f"{size}: transformers' own code is not cut among ranks; leave transformers_code out, "
            "or take tensor_parallel 1"
        )
    first, found = backend.device.index or 0, torch.cuda.device_count()
    if kind == "cuda" and found < first + ranks:
        raise EngineError(
            f"{size}: found {found} GPUs, and each rank has one of its own, from number {first} "
            "on; take fewer ranks"
        )
    others = partial(rank_backend, kind, backend.dtype, first)
    return FirstBackend(backend, open, config, others, start=_start(ranks))


def _start(ranks: int) -> Start:
    """What starts the other ranks; where torchrun has, a rank but the first never comes back.

    Raises:
        EngineError: torchrun has started another number of them.
    """
    started = torchrun_place()
    if started is None:
        return RankProcess
    rank, count = started
    if count != ranks:
        raise EngineError(
            f"tensor_parallel {ranks}: torchrun has started {count} processes. Give it "
            f"--nproc-per-node {ranks}, or leave it out: the engine starts its ranks itself"
        )
    if rank:
        run_rank(rank)
    return TorchrunStart()


def loader_of(inner: Backend) -> type[RankLoader]:
    """The kind of a rank's loader for the device of a backend."""
    if isinstance(inner, CpuBackend):
        return CpuLoader
    from inference.parallel.gpu import GpuLoader  # needs Triton

    return GpuLoader


def rank_backend(kind: str, dtype: torch.dtype, first: int, rank: int) -> Backend:
    """The backend of another rank than the first: on the next device of the same kind."""
    if kind == "cpu":
        return CpuBackend(dtype)
    from inference.gpu.backend import TritonBackend  # needs Triton

    torch.cuda.set_device(first + rank)
    return TritonBackend(torch.device("cuda", first + rank), dtype)


def _end(ranks: Ranks, threads: int, folder: str, devices: bool) -> None:
    """End ranks and what connects their devices, if anything; remove where they met, and give
    their threads back to this process."""
    ranks.close()
    shutil.rmtree(folder, ignore_errors=True)
    if devices and dist.is_initialized():  # others are gone: nothing is left to do together
        abort = Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
        abort.start()
        abort.join(ABORTED_WITHIN)
        if abort.is_alive():
            log.warning(
                "NCCL has not ended its connections in %g s (a CUDA graph may still hold its "
                "collectives); start another process before you make an engine on several GPUs",
                ABORTED_WITHIN,
            )
    with suppress(RuntimeError):
        torch.set_num_threads(threads)
