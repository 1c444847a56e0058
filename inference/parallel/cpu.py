"""Ranks on CPUs of one machine.

What is rounded to integers is rounded as on one rank: a dynamic scale of a token is that of all
ranks' inputs. With int8 inputs and one scale for an output the parts of a row-parallel layer are
integers, whose sum is scaled once: it has the bits of one rank. Sums of floats are rounded in
another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from inference.cpu.batch import Batch
from inference.cpu.decoder import CpuDecoder, forward_by_ops
from inference.cpu.layers import CpuExperts, Linear, pack_linear, static_integers
from inference.cpu.loop import HostLoop
from inference.models.read import StoredLinear
from inference.parallel.adapters import CpuRankAdapters, FirstAdapters, RankBatch, hold
from inference.parallel.communication import Group, HoldAdapter, Task
from inference.parallel.part import RankFactory, RankLayer, RankLoader
from inference.parallel.ranks import Ranks
from inference.scheduling.active import ActiveRequests
from kernels.cpu.weights import Weight, pack_quantized_weight
from kernels.numerics import (
    FP8,
    INT8,
    QuantizedType,
    block_absmax,
    choose_scale,
    fake_quantize,
    quantize,
)
from kernels.op_inputs import KVPool
from kernels.ops import fake_quantize_fp8, linear
from kernels.reference import RUN


class CpuLoader(RankLoader):
    """A rank on a CPU."""

    @override
    def join(self) -> Group:
        return self.host

    @override
    def factory(self, check: Callable[[], None]) -> CpuFactory:
        return CpuFactory(self.inner, self.shard, self.group, check)

    @override
    def own_free_bytes(self) -> int:
        return self.inner.free_bytes() // self.host.ranks  # of what all share

    @override
    def executor(self, pools: Sequence[KVPool]) -> Callable[[Task], None]:
        own = CpuRankAdapters(self.model, self.group)
        forward, progress = self._forward(pools, own), self.host.progress

        def run(task: Task) -> None:
            if isinstance(task, HoldAdapter):
                hold(self, own, task)
                return
            assert isinstance(task, Batch)
            progress.doing = f"{progress.doing}, of {len(task.ids)} tokens"
            forward(task)

        return run

    @override
    def loop(self, pools: Sequence[KVPool], ranks: Ranks, requests: ActiveRequests) -> HostLoop:
        own = CpuRankAdapters(self.model, self.group)
        forward = self._forward(pools, own)

        def run(batch: Batch) -> Tensor:
            with ranks.together(f"running a step of {len(batch.ids)} tokens"):
                ranks.send(batch)
                return forward(batch)

        return RanksLoop(FirstAdapters(self, own, ranks), run, requests, lambda: own)

    def _forward(self, pools: Sequence[KVPool], own: CpuRankAdapters) -> Callable[[Batch], Tensor]:
        """What runs the steps of the rank's part on its cache, with its parts of adapters."""
        forward = partial(forward_by_ops, cast(CpuDecoder, self.model), pools)
        return lambda batch: forward(batch if batch.adapters is None else RankBatch.of(batch, own))


class RanksLoop(HostLoop):
    """Steps of an engine on several ranks.

    Args:
        shared: The adapters of all.
        rest: As of `HostLoop`.
    """

    def __init__(self, shared: FirstAdapters, *rest: Any) -> None:
        super().__init__(*rest)
        self._shared = shared

    @override
    def adapters(self) -> FirstAdapters:
        super().adapters()
        return self._shared


class CpuFactory(RankFactory):
    """Makes a rank's layers on a CPU."""

    def row_parallel(self, stored: StoredLinear) -> RowParallel | RowParallelIntegers:
        """Pack the rank's part; parts of int8 inputs with one scale for an output are integers."""
        weights, inputs = stored.scheme.weights, stored.scheme.activations
        integral = weights is not None and weights.dtype in ("int8", "int4")
        whole = stored.group is None and stored.zero_point is None
        if not (integral and whole and inputs is not None and inputs.dtype == "int8"):
            own = pack_linear(replace(stored, bias=None), self.dtype)
            return RowParallel(own, stored.bias, self._group)
        assert weights is not None
        assert stored.scale is not None
        one = torch.ones(len(stored.weight), 1)
        runs = [
            pack_quantized_weight(run, one, weights.dtype, integer_inputs=True)
            for run in stored.weight.split(RUN, dim=1)
        ]
        own = IntegerRuns(runs, stored.scale.float().reshape(-1).contiguous())
        scales = (stored.input_scale, stored.sink_scale)
        return RowParallelIntegers(own, scales, stored.bias, self._group)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> CpuExperts:
        """Pack the same layer of each expert."""
        each = [self.linear(one) for stack in stacks for one in stack.unstacked()]
        return CpuExperts(cast(list[Linear], each))  # they are called, and no more


StaticScales = tuple[Tensor | None, Tensor | None]  # of most rows, and of those of sink tokens


@dataclass(frozen=True)
class RowParallel(RankLayer):
    """A row-parallel layer: each rank has some of its inputs.

    Attributes:
        own: The rank's part, a `Linear` without bias, which gives its share of the sum.
        bias: fp32 [N], added to the sum, or None.
        group: All ranks.
    """

    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in the type of `x`."""
        return _finished(self.group.sum(self._part(x, sinks)), self.bias, x.dtype)

    def _part(self, x: Tensor, sinks: Tensor | None) -> Tensor:
        """The rank's share, fp32."""
        own: Linear = self.own
        spec = own.activations
        if spec is None:
            return linear(x, own.weight)
        if spec.dtype == "fp8_e4m3":
            if own.input_scale is not None:
                return own(x, sinks)  # no scale is of other ranks' data
            if spec.group == -1:
                seen = fake_quantize(x, token_scale(x, self.group, FP8), FP8)
            else:
                seen = fake_quantize_fp8(x, None, spec.group)
            return linear(seen, own.weight)
        xq, scale = integers(x, (own.input_scale, own.sink_scale), self.group, sinks)
        return linear(xq, own.weight, scale)


@dataclass(frozen=True)
class IntegerRuns:
    """The weight of a rank's part of int8 inputs and one scale for an output.

    Attributes:
        runs: Runs of inputs so short that sums over them are exact in fp32, without scales.
        scale: fp32 [N].
    """

    runs: Sequence[Weight]
    scale: Tensor
    quantized = True

    def __call__(self, xq: Tensor) -> Tensor:
        """int8 [T, K] -> int32 [T, N]."""
        one = torch.ones(1)
        parts = (
            linear(part, run, one).to(torch.int32)
            for part, run in zip(xq.split(RUN, dim=1), self.runs, strict=True)
        )
        return torch.as_tensor(sum(parts))

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(run.nbytes for run in self.runs) + self.scale.nbytes


@dataclass(frozen=True)
class RowParallelIntegers(RankLayer):
    """A row-parallel layer of int8 inputs and weights with one scale for an output.

    Attributes:
        own: The rank's part, `IntegerRuns`.
        scales: Of the input, fp32, one element, and of sink tokens' rows; None where each token is
            scaled by its own values, and where sink tokens have the same.
        bias: fp32 [N], added to the sum, or None.
        group: All ranks.
    """

    scales: StaticScales
    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in the type of `x`."""
        xq, x_scale = integers(x, self.scales, self.group, sinks)
        total = self.group.sum(self.own(xq))
        return _finished(total.float() * (x_scale * self.own.scale), self.bias, x.dtype)


def integers(
    x: Tensor, scales: StaticScales, group: Group, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a layer's input as int8, and their scales: static ones, or of each whole row."""
    static, of_sinks = scales
    if static is not None:
        return static_integers(x, static, of_sinks, sinks)
    scale = token_scale(x, group, INT8)
    return quantize(x, scale), scale


def token_scale(x: Tensor, group: Group, kind: QuantizedType) -> Tensor:
    """The scale of each row, of which the ranks have parts: fp32 [T, 1]."""
    return choose_scale(group.largest(block_absmax(x, (1, -1))), kind)


def _finished(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias).to(dtype)
