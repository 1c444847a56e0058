"""Ranks on GPUs of one machine, a GPU each: NCCL, and all-reduce kernels fused with what follows.

A step is a CUDA graph on every rank, collectives included. Rank 0 sends each step's plan, a block
of bytes, before it launches its own, and chooses tokens, which are broadcast on the device.

A row-parallel layer gives a partial sum (`inference.gpu.ranks.Partial`). With static int8 inputs
and sums of integers alone the parts are integers, and the sum has the bits of one GPU. Other parts
are floats of the model's type, which are added in fp32; a dynamic scale of a token is then that of
the rank's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from formats.errors import CheckpointError, EngineError
from inference.gpu.backend import TritonBackend
from inference.gpu.decoder import GpuDecoder
from inference.gpu.layers import GpuLinear, as_wanted, pack_linear
from inference.gpu.loop import DeviceLoop
from inference.gpu.ranks import Partial, StepRanks
from inference.gpu.runner import GpuRunner
from inference.gpu.steps import StepPlan
from inference.models.read import StoredLinear
from inference.parallel.adapters import FirstAdapters, hold
from inference.parallel.communication import (
    GlooGroup,
    Group,
    HoldAdapter,
    Replay,
    RunPlan,
    Task,
    WarmUp,
    cut_parts,
    widened,
)
from inference.parallel.part import Gathered, Head, RankFactory, RankLayer, RankLoader, device_store
from inference.parallel.ranks import Ranks
from inference.requests.request import StepResult
from inference.scheduling.active import ActiveRequests
from inference.scheduling.batch import RunningBatch
from inference.scheduling.work import Work
from kernels.op_inputs import KVPool
from kernels.triton.collective.all_reduce import AllReduce, Scaling
from kernels.triton.linear.weight import InputFormat

CONNECTING = "connecting its GPU with the others'"
CONNECTED_WITHIN = 20.0  # seconds
KERNELS_FOR = (2, 4, 8)  # ranks for which there are all-reduce kernels


class NcclGroup(Group):
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

    @override
    def largest(self, part: Tensor) -> Tensor:
        dist.all_reduce(part, dist.ReduceOp.MAX)
        return part

    @override
    def smallest(self, number: int) -> int:
        return self._host.smallest(number)

    @override
    def side_by_side(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        own = widened(part, sizes)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own)
        return cut_parts(parts, sizes)

    @override
    def on_first(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
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


class GpuLoader(RankLoader):
    """A rank on a GPU."""

    group: NcclGroup

    @override
    def join(self) -> NcclGroup:
        """Meet by NCCL."""
        host, config, dtype = self.host, self.config, self.inner.dtype
        if host.ranks not in KERNELS_FOR:
            raise EngineError(
                f"tensor_parallel {host.ranks}: sums over GPUs are for "
                f"{', '.join(map(str, KERNELS_FOR))} of them; take as many"
            )
        if dist.is_initialized():
            raise EngineError(
                f"tensor_parallel {host.ranks}: this process has a torch.distributed group "
                "already, and has one at a time. Close the engine that made it, or take another "
                "process"
            )
        device = torch.device("cuda", self.inner.device.index or 0)
        torch.cuda.set_device(device)
        store, before = device_store(host), host.progress.doing
        host.progress.doing = CONNECTING
        with host.progress.waiting(CONNECTED_WITHIN):
            dist.init_process_group(
                "nccl", store=store, rank=host.rank, world_size=host.ranks, device_id=device
            )
            world = dist.group.WORLD
            assert world is not None
            most = config.max_batched_tokens + config.max_batch_size
            reducer = AllReduce.over(world, device, most, self.shape.hidden_size, dtype)
        host.progress.doing = before
        return NcclGroup(host, reducer)

    @override
    def factory(self, check: Callable[[], None]) -> GpuFactory:
        return GpuFactory(self.inner, self.shard, self.group, check)

    @override
    def executor(self, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        batch = RunningBatch(self.config.max_batch_size)
        runner = self._runner(pools, batch, PlannedSteps(self.group, self.inner.device))

        def run(task: Task) -> None:
            if isinstance(task, HoldAdapter):
                hold(self, runner.executor.adapters(), task)
            elif isinstance(task, WarmUp):
                runner.warm_up(task.sequences, task.tokens, task.rows)
            elif isinstance(task, Replay):
                runner.executor.replay(task.sequences, task.times)
            else:
                assert isinstance(task, RunPlan)
                self.host.progress.count += 1
                runner.follow(task.size, task.block)
                self.group.check()

        return run

    @override
    def loop(self, pools: Sequence[KVPool], ranks: Ranks, requests: ActiveRequests) -> RanksLoop:
        steps = PlannedSteps(self.group, self.inner.device, ranks)
        runner = self._runner(pools, requests.scheduler.batch, steps)
        ranks.before_end(runner.graphs.forget)  # they hold collectives
        ranks.on_failure(self.group.give_up)
        return RanksLoop(self, ranks, steps, runner, requests, ahead=not self.config.eager)

    def _runner(
        self, pools: Sequence[KVPool], batch: RunningBatch, steps: PlannedSteps
    ) -> GpuRunner:
        inner, model = cast(TritonBackend, self.inner), cast(GpuDecoder, self.model)
        return inner.runner(model, pools, self.config, batch, steps)


class PlannedSteps(StepRanks):
    """Steps that all ranks run; see `inference.gpu.ranks.StepRanks`.

    Args:
        group: All ranks' devices.
        ranks: The others, on the first rank.

    Attributes:
        steps: That the others were given.
    """

    def __init__(self, group: NcclGroup, device: torch.device, ranks: Ranks | None = None) -> None:
        self._group, self._device, self.count = group, device, group.ranks
        self._ranks, self.first, self.steps = ranks, ranks is not None, 0
        self.share = group.share  # the first rank's tokens

    def tell(self, plan: StepPlan) -> None:
        """Have the others run a step."""
        assert self._ranks is not None
        self._ranks.send(RunPlan(plan.size, plan.block.numpy().tobytes()))
        self._group.progress.count += 1
        self.steps += 1

    @override
    def meet(self) -> None:
        with self._group.progress.waiting():
            torch.cuda.synchronize(self._device)
        self._group.check()

    @override
    def agree(self, fits: bool) -> bool:
        with self._group.progress.waiting():
            return bool(self._group.smallest(int(fits)))

    @override
    def gather(self, part: Tensor) -> Tensor:
        sizes = [part.numel()] * self.count
        return self._group.side_by_side(part.view(1, -1), sizes).view(-1, *part.shape)


class RanksLoop(DeviceLoop):
    """Steps of an engine on several GPUs: where one fails, all ranks end.

    Args:
        loader: The first rank.
        ranks: The other ranks.
        planned: What they are given.
        rest: As of `DeviceLoop`.
    """

    def __init__(
        self, loader: GpuLoader, ranks: Ranks, planned: PlannedSteps, *rest: Any, **named: Any
    ) -> None:
        super().__init__(*rest, **named)
        self._loader, self._ranks, self._planned = loader, ranks, planned
        self._group = loader.group

    @override
    def adapters(self) -> FirstAdapters:
        return FirstAdapters(self._loader, self.runner.executor.adapters(), self._ranks)

    @override
    def step(self) -> StepResult:
        with self._ranks.together(f"running step {self._planned.steps + 1}"):
            result = super().step()
            self._group.check()
            return result

    @override
    def settle(self) -> StepResult:
        with self._group.progress.waiting():
            return super().settle()

    @override
    def score(self, work: Work) -> Tensor:
        with self._ranks.together("scoring a text"):
            logits = super().score(work)
            if logits.is_cuda:
                with self._group.progress.waiting():
                    torch.cuda.synchronize(logits.device)
            return logits

    @override
    def warm_up(self) -> None:
        with self._ranks.together("warming up"):
            super().warm_up()

    @override
    def replay(self, sequences: int, times: int) -> None:
        with self._ranks.together("replaying a step"):
            self._ranks.send(Replay(sequences, times))
            super().replay(sequences, times)
            with self._group.progress.waiting():
                torch.cuda.synchronize()

    def _warm(self, sequences: int, tokens: int, rows: int) -> None:
        self._ranks.send(WarmUp(sequences, tokens, rows))
        super()._warm(sequences, tokens, rows)


class GpuFactory(RankFactory):
    """Makes a rank's layers on a GPU."""

    @override
    def head(self, own: GpuLinear, tokens: Sequence[int]) -> GpuHead:
        return GpuHead(own, tokens, self._group)

    @override
    def gathered(
        self, own: GpuLinear, inputs: Sequence[int], outputs: Sequence[int]
    ) -> GpuGathered:
        return GpuGathered(own, inputs, outputs, self._group, InputFormat(self.dtype))

    def row_parallel(self, stored: StoredLinear) -> GpuRowParallel:
        """Pack the rank's part; where parts are floats, the first rank's has the bias."""
        reducer = self._group.reducer
        plain = pack_linear(replace(stored, bias=None), self.dtype)
        if stored.input_scale is not None and plain.weight.exact and plain.outputs is None:
            scale = plain.weight.output_scale.float().reshape(-1).contiguous()
            bias = None if stored.bias is None else stored.bias.float().contiguous()
            return GpuRowParallel(plain, Scaling(stored.input_scale, scale, bias), reducer)
        biased = self._shard.rank == 0 and stored.bias is not None
        return GpuRowParallel(pack_linear(stored, self.dtype) if biased else plain, None, reducer)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> Any:
        """Refuse a mixture of experts.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "tensor_parallel: mixtures of experts are cut among ranks on a CPU alone so far. Run "
            "it with tensor_parallel 1"
        )


@dataclass(frozen=True)
class GpuRowParallel(RankLayer):
    """A row-parallel layer: each rank has some of its inputs.

    Attributes:
        own: The rank's part; it has the bias on the first rank alone, and none of integers.
        scaling: What makes floats of its integers; None where it gives floats.
        reducer: Sums parts.
    """

    own: GpuLinear
    scaling: Scaling | None
    reducer: AllReduce

    def __call__(
        self, x: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Partial:
        """The rank's part of [T, N], of its inputs [T, K] float."""
        return self.run(*as_wanted(x, self.rows, sinks), dtype or x.dtype)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Partial:
        """The same of rows that are as the layer wants them."""
        scaling = self.scaling
        if scaling is not None and scales is not None:  # of each row, where there are sink tokens
            scaling = replace(scaling, x_scale=scales)
        kind = dtype if scaling is None else torch.int32
        return Partial(self.own.run(rows, scales, kind), scaling, self.reducer)

    @override
    def with_own(self, change: Callable[[GpuLinear], GpuLinear]) -> GpuRowParallel:
        if self.scaling is None:
            raise EngineError(
                "invariant: parts of sums over ranks are floats here, which are added in an order "
                "that depends on the batch. Take a scheme with static int8 inputs, such as a8w8c8, "
                "or leave invariant out"
            )
        return self  # integers: any order is the same

    @property
    def rows(self) -> InputFormat:
        """How its input is given to `run`."""
        return self.own.rows


@dataclass(frozen=True)
class GpuGathered(Gathered):
    """`Gathered`, with floats for inputs: all are gathered before they are quantized."""

    rows: InputFormat

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same of rows in the model's float type, in `dtype`."""
        return self(rows, None, dtype)


@dataclass(frozen=True)
class GpuHead(Head):
    """`Head`, of rows that may be quantized by the kernel ahead."""

    own: GpuLinear

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same of rows that are as the layer wants them, in `dtype`."""
        return self.group.on_first(self.own.run(rows, scales, dtype), self.tokens)

    @property
    def rows(self) -> InputFormat:
        """How its input is given to `run`."""
        return self.own.rows
