"""Ranks on CPUs of one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from inference.backend import Backend
from inference.cpu.decoder import CpuDecoder, forward_by_ops
from inference.cpu.layers import Batch, CpuExperts, Linear, pack_linear
from inference.cpu.loop import HostLoop
from inference.models.config import ModelConfig
from inference.models.read import StoredLinear
from inference.parallel.cpu_layers import (
    GatheredLinear,
    HeadPart,
    SummedIntegers,
    SummedLinear,
    summed,
)
from inference.parallel.decoder import Kind, kind_of, sizes_of
from inference.parallel.group import GlooGroup, Group
from inference.parallel.loader import RankLoader
from inference.parallel.messages import RankSpec, RunStep, Task, packed, unpacked
from inference.parallel.ranks import Ranks
from inference.parallel.shard import Shard
from kernels.attention_inputs import KVPool

CpuPart = Linear | SummedLinear | SummedIntegers | GatheredLinear | HeadPart


class CpuSide:
    """See `inference.parallel.loader.DeviceSide`."""

    def join(self, inner: Backend[Any, Any], spec: RankSpec, host: GlooGroup, hidden: int) -> Group:
        """The group of the processes."""
        return host

    def factory(
        self, inner: Backend[Any, Any], shard: Shard, group: Group, check: Callable[[], None]
    ) -> CpuFactory:
        """Makes the rank's layers."""
        return CpuFactory(inner.dtype, shard, group, check)

    def free_bytes(self, inner: Backend[Any, Any], ranks: int) -> int:
        """An equal part of what the system has left."""
        return inner.free_bytes() // ranks

    def executor(self, loader: RankLoader, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        """What runs the steps that the first rank plans."""
        forward, progress = _forward(loader, pools), loader.host.progress

        def run(task: Task) -> None:
            assert isinstance(task, RunStep)
            batch = unpacked(task.block)
            progress.doing = f"{progress.doing}, of {len(batch.ids)} tokens"
            forward(batch)

        return run

    def loop(
        self, loader: RankLoader, pools: Sequence[KVPool], ranks: Ranks, **rest: Any
    ) -> HostLoop:
        """The steps of an engine, on all ranks."""
        forward = _forward(loader, pools)

        def run(batch: Batch) -> Tensor:
            with ranks.together(f"running a step of {len(batch.ids)} tokens"):
                ranks.send(RunStep(packed(batch)))
                return forward(batch)

        return HostLoop(run, rest["scheduler"], rest["requests"])


def _forward(loader: RankLoader, pools: Sequence[KVPool]) -> Callable[[Batch], Tensor]:
    """What runs the steps of a rank's part on its cache."""
    return partial(forward_by_ops, cast(CpuDecoder, loader.model), pools)


class CpuFactory:
    """Makes a rank's layers on a CPU; see `inference.models.layers.LayerFactory`.

    Args:
        dtype: Of activations and of float weights.
        shard: What the rank holds.
        group: All ranks.
        check: Raises where another rank has failed.
    """

    device = torch.device("cpu")

    def __init__(
        self, dtype: torch.dtype, shard: Shard, group: Group, check: Callable[[], None]
    ) -> None:
        self.dtype, self._shard, self._group, self._check = dtype, shard, group, check

    def check(self, config: ModelConfig) -> None:
        """Every part that is cut runs here."""

    def linear(self, stored: StoredLinear) -> CpuPart:
        """Pack a layer, as the rank has it."""
        self._check()
        self._group.progress.count += 1
        shard, group = self._shard, self._group
        match kind_of(stored, shard):
            case Kind.HEAD:
                tokens = [span.count for span in shard.vocabulary]
                return HeadPart(pack_linear(stored, self.dtype), tokens, group)
            case Kind.GATHERED:
                return GatheredLinear(
                    pack_linear(stored, self.dtype), *sizes_of(stored, shard), group
                )
            case Kind.SUMMED:
                return summed(stored, self.dtype, group)
            case Kind.OWN:
                return pack_linear(stored, self.dtype)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> CpuExperts:
        """Pack the same layer of each expert."""
        each = [self.linear(one) for stack in stacks for one in stack.unstacked()]
        return CpuExperts(cast(list[Linear], each))  # they are called, and no more
