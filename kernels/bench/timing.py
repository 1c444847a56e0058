"""How calls on a GPU are timed: medians of CUDA-graph replays, arguments rotated past its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

ROTATED = 300e6  # bytes that are read between two uses of a copy; L2 holds 50 to 60 MB


def copies_of(nbytes: float, most: int = 32) -> int:
    """Sets of arguments of so many bytes, of which none is still in L2 when its turn comes."""
    return max(1, min(most, int(ROTATED / nbytes) + 1))


def timed(call: Callable[[int], object], copies: int, repeats: int = 20) -> float:
    """Median microseconds of call(i), i cycling over `copies`, of replays of a CUDA graph.

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
        settle()
    for _ in range(10):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return statistics.median(times)


def settle() -> None:
    """Wait: timings straight after fp64 work came out up to a fifth too long."""
    torch.cuda.synchronize()
    time.sleep(0.05)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if anything is NaN."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()
