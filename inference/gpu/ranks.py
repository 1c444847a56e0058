"""What a step on a GPU knows of other GPUs that hold parts of the same model.

A layer whose inputs the ranks have parts of gives a `Partial` in the place of its result: the sum
over ranks is made with what follows it anyway, by the kernel that adds it to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from inference.gpu.layers import GpuLinear
from inference.gpu.steps import StepPlan
from kernels.triton.collective.all_reduce import AllReduce, Scaling
from kernels.triton.linear.weight import InputFormat


@dataclass(frozen=True)
class Partial:
    """A rank's part of what a sub-layer adds.

    Attributes:
        x: [T, H] in the model's float type, or int32 with a scaling.
        scaling: What makes floats of the sum of integers; None for floats.
        reducer: Sums it over ranks.
    """

    x: Tensor
    scaling: Scaling | None
    reducer: AllReduce

    def __getitem__(self, rows: Tensor) -> Partial:
        """Some rows of it."""
        scaling = self.scaling
        if scaling is not None and scaling.x_scale.numel() > 1:
            scaling = replace(scaling, x_scale=scaling.x_scale[rows])
        return Partial(self.x[rows], scaling, self.reducer)

    def summed(self) -> Tensor:
        """Its sum over ranks alone: [T, H] in the model's float type."""
        return self.reducer.sum(self.x, self.scaling)

    def add_rms_norm(
        self,
        total: Tensor,
        before: Tensor | None,
        eps: float,
        wanted: InputFormat,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Its sum over ranks and the residual stream, and the norm of that."""
        rest = (wanted.scale, wanted.dtype, wanted.group)
        return self.reducer.add_rms_norm(
            self.x, total, before, eps, *rest, residual_ready=True, after=after,
            scaling=self.scaling,
        )  # fmt: skip


@runtime_checkable
class OfSeveralRanks(Protocol):
    """A layer of which each rank has a part."""

    def with_own(self, change: Callable[[GpuLinear], GpuLinear]) -> Any:
        """The same layer with another part of this rank.

        Raises:
            EngineError: what other ranks have is added to it in an order that depends on the batch.
        """
        ...


class StepRanks(Protocol):
    """The ranks that run the same steps, as one of them sees them.

    Attributes:
        first: Whether this is the one that plans, and that chooses tokens.
        count: How many there are.
    """

    first: bool
    count: int

    def tell(self, plan: StepPlan) -> None:
        """Have the others run a step that this one is about to run."""
        ...

    def meet(self) -> None:
        """Wait until this rank's GPU has done all; RuntimeError where a kernel gave up waiting."""
        ...

    def agree(self, fits: bool) -> bool:
        """Whether something fits on every rank; all ask at the same point."""
        ...

    def share(self, chosen: Tensor) -> Tensor:
        """The first rank's tokens: int64 of a shape that all know; called in every step."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """All-gather: [ranks, ...] of tensors of one shape, in the order of ranks."""
        ...
