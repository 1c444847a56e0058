"""Ranks on GPUs of one machine, a GPU each: NCCL, and all-reduce kernels fused with what follows.

A step is a CUDA graph on every rank, collectives included. Rank 0 sends each step's plan, a block
of bytes, before it launches its own, and chooses tokens, which are broadcast on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from formats.errors import CheckpointError, EngineError
from inference.backend import Backend
from inference.config import EngineConfig
from inference.gpu.backend import TritonBackend
from inference.gpu.decoder import GpuDecoder
from inference.gpu.invariant import invariant_decoder
from inference.gpu.layers import pack_linear
from inference.gpu.loop import DeviceLoop
from inference.gpu.ranks import Reducer
from inference.gpu.runner import GpuRunner
from inference.gpu.steps import StepPlan
from inference.models.config import ModelConfig
from inference.models.read import StoredLinear
from inference.parallel.decoder import Kind, kind_of, sizes_of
from inference.parallel.gpu_layers import (
    GatheredGpuLinear,
    GpuHeadPart,
    summed,
)
from inference.parallel.group import GlooGroup, Group, cut_parts, widened
from inference.parallel.loader import RankLoader
from inference.parallel.messages import RankSpec, Replay, RunPlan, Task, WarmUp
from inference.parallel.ranks import Ranks
from inference.parallel.shard import Shard
from inference.requests.request import StepResult
from inference.scheduling.batch import RunningBatch
from inference.scheduling.blocks import blocks_for
from inference.scheduling.work import Work
from kernels.attention_inputs import KVPool
from kernels.triton import fused
from kernels.triton.collective.all_reduce import AllReduce
from kernels.triton.collective.scaling import Scaling
from kernels.triton.linear.weight import InputFormat

CONNECTING = "connecting its GPU with the others'"
CONNECTED_WITHIN = 20.0  # seconds
KERNELS_FOR = (2, 4, 8)  # ranks for which there are all-reduce kernels


class DeviceGroup(Group, Protocol):
    """A group of GPUs with its all-reduce.

    Attributes:
        reducer: Sums rows of the residual stream.
    """

    reducer: Reducer

    def share(self, chosen: Tensor) -> Tensor:
        """Broadcast: the tensor of rank 0."""
        ...

    def check(self) -> None:
        """Raise RuntimeError where a kernel gave up waiting for a rank."""
        ...

    def give_up(self) -> None:
        """Have kernels that wait for a rank wait no longer."""
        ...


class NcclGroup:
    """Ranks on GPUs; see `Group`. Everything can be captured.

    Args:
        host: The group of the processes.
        reducer: Sums rows of the residual stream.
    """

    def __init__(self, host: GlooGroup, reducer: AllReduce) -> None:
        self.rank, self.ranks, self.progress = host.rank, host.ranks, host.progress
        self._host, self.reducer = host, reducer

    def sum(self, part: Tensor) -> Tensor:
        """Rows of the residual stream; see `Group.sum`."""
        return self.reducer.sum(part)

    def largest(self, part: Tensor) -> Tensor:
        """See `Group.largest`."""
        dist.all_reduce(part, dist.ReduceOp.MAX)
        return part

    def smallest(self, number: int) -> int:
        """See `Group.smallest`."""
        return self._host.smallest(number)

    def side_by_side(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Group.side_by_side`."""
        own = widened(part, sizes)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own)
        return cut_parts(parts, sizes)

    def on_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Group.on_first`."""
        own = widened(part, sizes)
        if self.rank:
            dist.gather(own, None, 0)
            return part
        parts = [torch.empty_like(own) for _ in sizes]
        dist.gather(own, parts, 0)
        return cut_parts(parts, sizes)

    def share(self, chosen: Tensor) -> Tensor:
        """Broadcast: the tensor of rank 0."""
        dist.broadcast(chosen, 0)
        return chosen

    def check(self) -> None:
        """Raise RuntimeError where a kernel gave up waiting for a rank."""
        self.reducer.check()

    def give_up(self) -> None:
        """Have kernels that wait for a rank wait no longer."""
        self.reducer.give_up()


class HostGroup:
    """Ranks on one GPU, or on CPUs that stand for GPUs: collectives go through the host. For tests;
    nothing of it can be captured.

    Args:
        host: The group of the processes.
        dtype: The model's float type.
    """

    def __init__(self, host: GlooGroup, dtype: torch.dtype) -> None:
        self.rank, self.ranks, self.progress = host.rank, host.ranks, host.progress
        self._host, self._dtype = host, dtype
        self.reducer: Reducer = self

    def sum(self, x: Tensor, scaling: Scaling | None = None) -> Tensor:
        """See `Group.sum` and `Reducer.sum`."""
        wide = x.cpu() if scaling is not None else x.cpu().float()
        total = self._host.sum(wide).to(x.device)
        return total.to(self._dtype) if scaling is None else scaling.of(total, self._dtype)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        scale: Tensor | None = None,
        dtype: torch.dtype = torch.int8,
        group: int | None = None,
        residual_ready: bool = False,
        after: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Reducer.add_rms_norm`."""
        y = self.sum(x, scaling)
        rest = (scale, dtype, group, residual_ready, after)
        return fused.add_rms_norm(y, residual, weight, eps, *rest)

    def largest(self, part: Tensor) -> Tensor:
        """See `Group.largest`."""
        return self._host.largest(part.cpu()).to(part.device)

    def smallest(self, number: int) -> int:
        """See `Group.smallest`."""
        return self._host.smallest(number)

    def side_by_side(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Group.side_by_side`."""
        return self._host.side_by_side(part.cpu(), sizes).to(part.device)

    def on_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `Group.on_first`."""
        return self._host.on_first(part.cpu(), sizes).to(part.device)

    def share(self, chosen: Tensor) -> Tensor:
        """The first rank's tensor: of the others nothing but zeros is added."""
        own = chosen.cpu() if self.rank == 0 else torch.zeros(chosen.shape, dtype=chosen.dtype)
        return self._host.sum(own).to(chosen.device)

    def check(self) -> None:
        """Gloo itself tells where a rank is gone."""

    def give_up(self) -> None:
        """No kernel waits."""


class GpuSide:
    """See `inference.parallel.loader.DeviceSide`."""

    def join(
        self, inner: Backend[Any, Any], spec: RankSpec, host: GlooGroup, hidden: int
    ) -> DeviceGroup:
        """Meet by NCCL; through the host where ranks have no GPU of their own."""
        if inner.device.type != "cuda" or spec.on_host:
            return cast(DeviceGroup, HostGroup(host, inner.dtype))
        if spec.ranks not in KERNELS_FOR:
            raise EngineError(
                f"tensor_parallel {spec.ranks}: sums over GPUs are for "
                f"{', '.join(map(str, KERNELS_FOR))} of them; take as many"
            )
        if dist.is_initialized():
            raise EngineError(
                f"tensor_parallel {spec.ranks}: this process has a torch.distributed group "
                "already, and has one at a time. Close the engine that made it, or take another "
                "process"
            )
        device = torch.device("cuda", inner.device.index or 0)
        torch.cuda.set_device(device)
        store, before = FileStore(f"{spec.meeting}-devices", spec.ranks), host.progress.doing
        host.progress.doing = CONNECTING
        with host.progress.waiting(CONNECTED_WITHIN):
            dist.init_process_group(
                "nccl", store=store, rank=spec.rank, world_size=spec.ranks, device_id=device
            )
            world = dist.group.WORLD
            assert world is not None
            most = spec.config.max_batched_tokens + spec.config.max_batch_size
            reducer = AllReduce.over(world, device, most, hidden, inner.dtype)
        host.progress.doing = before
        return cast(DeviceGroup, NcclGroup(host, reducer))

    def factory(
        self, inner: Backend[Any, Any], shard: Shard, group: Group, check: Callable[[], None]
    ) -> GpuFactory:
        """Makes the rank's layers."""
        assert isinstance(inner, TritonBackend)
        return GpuFactory(inner, shard, cast(DeviceGroup, group), check)

    def free_bytes(self, inner: Backend[Any, Any], ranks: int) -> int:
        """What its GPU has left."""
        return inner.free_bytes()

    def executor(self, loader: RankLoader, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        """What runs the steps that the first rank plans."""
        ranks = PlannedSteps(cast(DeviceGroup, loader.group), loader.inner.device)
        batch = RunningBatch(loader.config.max_batch_size)
        runner = runner_of(loader, pools, batch, ranks)

        def run(task: Task) -> None:
            if isinstance(task, WarmUp):
                runner.warm_up(task.sequences, task.tokens, task.rows)
                return
            if isinstance(task, Replay):
                runner.replay(task.sequences, task.times)
                return
            assert isinstance(task, RunPlan)
            loader.host.progress.count += 1
            runner.follow(task.size, task.block)
            cast(DeviceGroup, loader.group).check()

        return run

    def loop(
        self, loader: RankLoader, pools: Sequence[KVPool], ranks: Ranks, **rest: Any
    ) -> RanksLoop:
        """The steps of an engine, on all ranks.

        Args:
            loader: Of the first rank.
            pools: Its part of the cache.
            ranks: The others.
            rest: Scheduler, sizes and requests of the engine.
        """
        scheduler = rest["scheduler"]
        group = cast(DeviceGroup, loader.group)
        steps = PlannedSteps(group, loader.inner.device, ranks)
        runner = runner_of(loader, pools, scheduler.batch, steps)
        ranks.before_end(runner.release)
        ranks.on_failure(group.give_up)
        ahead = not rest["sizes"].eager
        return RanksLoop(ranks, group, steps, runner, scheduler, rest["requests"], ahead=ahead)


def runner_of(
    loader: RankLoader, pools: Sequence[KVPool], batch: RunningBatch, ranks: PlannedSteps
) -> GpuRunner:
    """What runs the steps of a rank's part on its cache."""
    sizes: EngineConfig = loader.config
    assert sizes.max_model_len is not None
    model = cast(GpuDecoder, loader.model)
    return GpuRunner(
        invariant_decoder(model) if sizes.invariant else model,
        pools,
        loader.inner.device,
        batch,
        width=blocks_for(sizes.max_model_len),
        graphs=not sizes.eager,
        invariant=sizes.invariant,
        ranks=ranks,
    )


class PlannedSteps:
    """Steps that all ranks run; see `inference.gpu.ranks.StepRanks`.

    Args:
        group: All ranks' devices.
        device: This rank's.
        ranks: The others, on the first rank.

    Attributes:
        steps: That the others were given.
    """

    def __init__(
        self, group: DeviceGroup, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self._group, self._device = group, device
        self._ranks, self.first, self.steps = ranks, ranks is not None, 0

    def tell(self, plan: StepPlan) -> None:
        """Have the others run a step."""
        assert self._ranks is not None
        self._ranks.send(RunPlan(plan.size, plan.block.numpy().tobytes()))
        self._group.progress.count += 1
        self.steps += 1

    def meet(self) -> None:
        """See `inference.gpu.ranks.StepRanks`."""
        with self._group.progress.waiting():
            torch.cuda.synchronize(self._device)
        self._group.check()

    def share(self, chosen: Tensor) -> Tensor:
        """The first rank's tokens."""
        return self._group.share(chosen)


class RanksLoop(DeviceLoop):
    """Steps of an engine on several GPUs: where one fails, all ranks end.

    Args:
        ranks: The other ranks.
        group: All ranks' devices.
        planned: What `ranks` are given.
        rest: As of `DeviceLoop`.
    """

    def __init__(
        self, ranks: Ranks, group: DeviceGroup, planned: PlannedSteps, *rest: Any, **named: Any
    ) -> None:
        super().__init__(*rest, **named)
        self._ranks, self._group, self._planned = ranks, group, planned

    def step(self) -> StepResult:
        """See `DeviceLoop.step`."""
        with self._ranks.together(f"running step {self._planned.steps + 1}"):
            result = super().step()
            self._group.check()
            return result

    def settle(self) -> StepResult:
        """See `DeviceLoop.settle`."""
        with self._group.progress.waiting():
            return super().settle()

    def score(self, work: Work) -> Tensor:
        """See `DeviceLoop.score`."""
        with self._ranks.together("scoring a text"):
            launched = self.runner.launch(work)
            with self._group.progress.waiting():
                return launched.logits_of(np.arange(len(work)))

    def warm_up(self) -> None:
        """See `DeviceLoop.warm_up`."""
        with self._ranks.together("warming up"):
            super().warm_up()

    def replay(self, sequences: int, times: int) -> None:
        """See `DeviceLoop.replay`."""
        with self._ranks.together("replaying a step"):
            self._ranks.send(Replay(sequences, times))
            super().replay(sequences, times)
            with self._group.progress.waiting():
                torch.cuda.synchronize()

    def _warm(self, sequences: int, tokens: int, rows: int) -> None:
        self._ranks.send(WarmUp(sequences, tokens, rows))
        super()._warm(sequences, tokens, rows)


class GpuFactory:
    """Makes a rank's layers on a GPU; see `inference.models.layers.LayerFactory`.

    Args:
        inner: The backend of the rank's GPU.
        shard: What the rank holds.
        group: All ranks.
        check: Raises where another rank has failed.
    """

    def __init__(
        self, inner: TritonBackend, shard: Shard, group: DeviceGroup, check: Callable[[], None]
    ) -> None:
        self._inner, self._shard, self._group, self._check = inner, shard, group, check
        self.device, self.dtype = inner.device, inner.dtype

    def check(self, config: ModelConfig) -> None:
        """Refuse what the kernels do not take."""
        self._inner.check(config)

    def linear(self, stored: StoredLinear) -> Any:
        """Pack a layer, as the rank has it."""
        self._check()
        group, shard = self._group, self._shard
        group.progress.count += 1
        match kind_of(stored, shard):
            case Kind.HEAD:
                tokens = [span.count for span in shard.vocabulary]
                return GpuHeadPart(pack_linear(stored, self.dtype), tokens, group)
            case Kind.GATHERED:
                sizes, floats = sizes_of(stored, shard), InputFormat(self.dtype)
                own = pack_linear(stored, self.dtype)
                return GatheredGpuLinear(own, *sizes, group, floats)
            case Kind.SUMMED:
                return summed(stored, self.dtype, group.reducer, first=shard.rank == 0)
            case Kind.OWN:
                return pack_linear(stored, self.dtype)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> Any:
        """Refuse a mixture of experts.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "tensor_parallel: mixtures of experts are cut among ranks on a CPU alone so far. Run "
            "it with tensor_parallel 1"
        )
