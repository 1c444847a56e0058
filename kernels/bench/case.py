"""What is measured: an op on one shape, checked, then timed with arguments that no cache holds.

Whoever is compared takes turns, A B A B ..., so that what the machine does meanwhile hits all
alike. On a GPU a turn is the replay of a CUDA graph of some calls, and the median counts; on a CPU
it is one call, and the 20th percentile counts: on a machine that is shared, a thread that waits for
its core costs a slice of the scheduler, many times what an op takes.

Numbers of linear layers are random, and what they come to is computed in fp64.
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

import kernels.triton.reference as twins
from kernels.bench.shapes import SMALL_FLOATS, Gemm, Shape
from kernels.two_level import LARGEST

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


FP8 = torch.float8_e4m3fn
ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
UNIT = 2.0**-9


@dataclass(frozen=True)
class Numbers:
    """A weight as a checkpoint has it.

    Attributes:
        q: [N, K]: int8 (4 bits too, one a byte), e4m3, or the model's float type.
        scale: fp32 [N, groups], of fp8_block [N / 128, K / 128]; None of floats.
        zero_point: int8 [N, groups] or None.
        unit: What NVFP4's scales are e4m3 multiples of; None for others.
    """

    q: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    unit: float | None = None

    def product(self, x: Tensor, x_scale: Tensor | None) -> Tensor:
        """x W^T in fp64: [M, N] of x [M, K] with its scale a row, a run of 128 inputs, or none."""
        if self.scale is None:
            return twins.float_linear(x, self.q)
        if len(self.scale) < len(self.q):
            assert x_scale is not None
            return twins.fp8_block_linear(x, x_scale, self.q, self.scale)
        return twins.grouped_linear(x, self.q, self.scale, None, x_scale, self.zero_point)


def draw_weight(shape: Gemm, device: torch.device | str) -> Numbers:
    """A random weight of a family."""
    size = shape.outputs, shape.inputs
    if shape.base == "w16a16":
        return Numbers(torch.randn(size, device=device, dtype=getattr(torch, shape.dtype)))
    if shape.base.startswith("fp8"):
        blocks = (-(-shape.outputs // 128), -(-shape.inputs // 128))
        scales = blocks if shape.base == "fp8_block" else (shape.outputs, 1)
        return Numbers(torch.randn(size, device=device).to(FP8), _scales(scales, device))
    if shape.base == "w8a8":
        return Numbers(integers(size, 8, device), _scales((shape.outputs, 1), device))
    if shape.base in SMALL_FLOATS:
        return fp4_weight(shape, device)
    zeros = shape.family.endswith("_zeros")
    q, scale, zero_point = grouped_weight(int(shape.family[1]), *size, shape.group, zeros, device)
    if "two_level" in shape.family:
        scale = two_level_scale(shape.outputs, scale.shape[1], device)
    return Numbers(q, scale, zero_point)


def grouped_weight(
    bits: int, outputs: int, inputs: int, group: int, zeros: bool,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Random integers [N, K] of some bits, scales [N, groups], and zero points or None."""
    groups = (outputs, inputs // group)
    zero_point = integers(groups, bits, device) if zeros else None
    return integers((outputs, inputs), bits, device), _scales(groups, device), zero_point


def fp4_weight(shape: Gemm, device: torch.device | str) -> Numbers:
    """Random e2m1 elements [N, K] and scales: e4m3 multiples of a unit, or powers of two."""
    size, groups = (shape.outputs, shape.inputs), (shape.outputs, shape.inputs // shape.group)
    half = torch.tensor(ELEMENTS, device=device)
    values = torch.cat((half, -half)).to(FP8).view(torch.uint8)
    q = values[torch.randint(0, 16, size, device=device)].view(FP8)
    if shape.group == 32:
        return Numbers(q, torch.exp2(torch.randint(-9, -5, groups, device=device).float()))
    multiples = torch.randint(0x30, 0x50, groups, dtype=torch.uint8, device=device)
    return Numbers(q, multiples.view(FP8).float() * UNIT, unit=UNIT)


def integers(size: tuple[int, ...], bits: int, device: torch.device | str) -> Tensor:
    """Random int8 of 4 bits, -8 to 7, or of 8, -127 to 127."""
    low, high = (-8, 8) if bits == 4 else (-127, 128)
    return torch.randint(low, high, size, dtype=torch.int8, device=device)


def _scales(size: tuple[int, int], device: torch.device | str) -> Tensor:
    return torch.rand(size, device=device) * 0.01 + 0.002


def two_level_scale(outputs: int, groups: int, device: torch.device | str = "cuda") -> Tensor:
    """Random scales [outputs, groups] of two levels; the first two multiples are coprime."""
    multiple = torch.randint(1, LARGEST + 1, (outputs, groups), device=device).float()
    multiple[:, :1], multiple[:, 1:2] = LARGEST - 1, LARGEST
    unit = torch.randint(8, 16, (outputs, 1), device=device) * 2.0**-14
    return unit * multiple


def draw_rows(shape: Gemm, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Random inputs [M, K] of a family and their scales [M, 1]; None of those in floats."""
    size = (shape.rows, shape.inputs)
    if "a16" in shape.family:
        return torch.randn(size, device=device, dtype=getattr(torch, shape.dtype)), None
    own = torch.rand(shape.rows, 1, device=device) * 0.01
    if shape.family.startswith("fp8"):
        return torch.randn(size, device=device).to(FP8), own
    return integers(size, 8, device), own


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if anything is NaN."""
    wanted = wanted.double()
    return ((found.double() - wanted).norm() / wanted.norm()).item()
