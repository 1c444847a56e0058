"""What is measured: an op on one shape with arguments that no cache holds, checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.bench.shapes import Shape
from kernels.bench.timing import CLOCKS


@dataclass(frozen=True)
class BenchCase:
    """One op on one shape.

    Attributes:
        name: Of the op and shape, for a person.
        shape: What is computed, for peers that compute the same.
        call: call(i, cut) with the i-th set of arguments; `cut` a tile or the like, or None for
            what a model runs.
        copies: Sets of arguments.
        nbytes: Read and written by one call, at least.
        error: Distance of the result of call(0, ...) from the fp64 twin's, relative.
        tolerance: The largest error of a right result.
        operations: Multiplications and additions, where they may be the limit.
        unit: What multiplies them, a key of `Limits.rates`.
        twins: Cuts of the plain Triton kernel, where a model runs one with stated layouts (Gluon).
        device: `cuda` or `cpu`.
    """

    name: str
    shape: Shape
    call: Callable[[int, Any], Tensor]
    copies: int
    nbytes: int
    error: Callable[[Tensor], float]
    tolerance: float
    operations: float = 0.0
    unit: str = "16 bits"
    twins: tuple[Any, ...] = ()
    device: str = "cuda"

    def check(self, cut: Any = None) -> float:
        """The error of one call; raises ValueError where it is too large or NaN."""
        found = self.error(self.call(0, cut))
        if not found < self.tolerance:
            raise ValueError(f"{self.name} with {cut}: error {found}, allowed is {self.tolerance}")
        return found

    def sample(self, cut: Any = None) -> Callable[[], float]:
        """What gives the microseconds of a call, measured anew each time."""
        return CLOCKS[self.device].sample(lambda i: self.call(i, cut), self.copies)

    def time(self, cut: Any = None) -> float:
        """Microseconds of one call."""
        return CLOCKS[self.device].times([self.sample(cut)])[0]


@dataclass(frozen=True)
class Limits:
    """What a device does at most.

    Attributes:
        device: Its name.
        bandwidth: Bytes a microsecond.
        rates: Operations a microsecond, by what multiplies.
        note: How they were found, for a person.
    """

    device: str
    bandwidth: float
    rates: Mapping[str, float]
    note: str = ""

    def floor(self, case: BenchCase) -> float:
        """Microseconds that no implementation of a case can beat."""
        return max(case.nbytes / self.bandwidth, case.operations / self.rates[case.unit])
