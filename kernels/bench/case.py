"""What is measured: an op on one shape, checked, then timed with arguments that no cache holds.

Whoever is compared takes turns, A B A B ..., so that what the machine does meanwhile hits all
alike. On a GPU a turn is the replay of a CUDA graph of some calls, and the median counts; on a CPU
it is one call, and the 20th percentile counts: on a machine that is shared, a thread that waits for
its core costs a slice of the scheduler, many times what an op takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.bench.shapes import Shape

T = TypeVar("T")
log = logging.getLogger("ptq.kernels")

ROTATED = {"cuda": 300e6, "cpu": 96e6}  # bytes read between two uses of an argument: beyond caches

Call = Callable[[int], object]
"""call(i) with the i-th set of arguments."""


def copies_of(nbytes: float, device: torch.device | str = "cuda", most: int = 32) -> int:
    """Sets of arguments of so many bytes, of which none is in a cache when its turn comes."""
    return max(1, min(most, int(ROTATED[torch.device(device).type] / nbytes) + 1))


def rotated(first: Tensor, at_once: int = 1, most: int = 32) -> list[Tensor]:
    """Copies of a tensor, of which a call reads one, beside others as large."""
    copies = copies_of(at_once * first.nbytes, first.device, most)
    return [first, *(first.clone() for _ in range(copies - 1))]


def in_turns(samples: Sequence[Callable[[], T]], turns: Iterable[object]) -> list[list[T]]:
    """What each sample gave in each turn."""
    found: list[list[T]] = [[] for _ in samples]
    for _ in turns:
        for sample, kept in zip(samples, found, strict=True):
            kept.append(sample())
    return found


@dataclass(frozen=True)
class Clock:
    """How calls are timed on a device.

    Attributes:
        sample: Of call(i), i cycling over so many sets of arguments: what gives the microseconds of
            a call, measured anew each time.
        quantile: Of these that counts.
        least: Turns at least.
        seconds: That are spent at least.
    """

    sample: Callable[[Call, int], Callable[[], float]]
    quantile: float
    least: int
    seconds: float = 0.0

    def times(self, samples: Sequence[Callable[[], float]]) -> list[float]:
        """Microseconds of each, in turns."""
        taken = in_turns(samples, self._turns())
        return [float(np.quantile(each, self.quantile)) for each in taken]

    def _turns(self) -> Iterator[int]:
        start, turn = time.perf_counter(), 0
        while turn < self.least or time.perf_counter() - start < self.seconds:
            yield turn
            turn += 1


def replays(call: Call, copies: int) -> Callable[[], float]:
    """Microseconds of a call in a replayed CUDA graph.

    A call starts when the one ahead of it has ended: in a model it is another kernel.
    """
    from kernels.triton.common import alone  # no Triton is needed for what else is here

    inner = max(copies, 8)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with alone():
        for i in range(2):
            call(i % copies)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(inner):
                call(i % copies)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(0.05)  # timings straight after fp64 work are up to a fifth too long
    for _ in range(10):
        graph.replay()

    return partial(replay, graph, inner, call)


def replay(graph: torch.cuda.CUDAGraph, inner: int, _held: Call) -> float:
    """Microseconds of each of a graph's calls; what they read lives as long as they are held."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / inner


def calls(call: Call, copies: int) -> Callable[[], float]:
    """Microseconds of a call on a CPU."""
    turn = 0
    call(0)  # warm

    def sample() -> float:
        nonlocal turn
        turn = (turn + 1) % copies
        start = time.perf_counter()
        call(turn)
        return (time.perf_counter() - start) * 1e6

    return sample


CLOCKS = {"cuda": Clock(replays, 0.5, 20), "cpu": Clock(calls, 0.2, 5, 0.4)}


@dataclass(frozen=True)
class BenchCase:
    """One op on one shape.

    Attributes:
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

    def timed(self, cuts: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Cuts that fit on the device, and the microseconds of each; errors as of `check`."""
        for cut in cuts:
            from triton.runtime.errors import OutOfResources

            try:
                self.check(cut)
            except OutOfResources as error:
                log.info("%s %s: %s", self.name, cut, error)
            else:
                yield cut, self.time(cut)


@dataclass(frozen=True)
class Limits:
    """What a device does at most.

    Attributes:
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
