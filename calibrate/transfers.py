"""Hidden states on their way between the host's memory and a GPU, and sums on theirs between GPUs.

Both go beside the work on them, on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory that a GPU reaches at full speed; `x` itself if it is on the host."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


RUNS = 16  # of neighbouring samples, at most
TOGETHER = {"cuda": 1 << 22}  # numbers of hidden states that go through a block at once, by device


def run_size(count: int) -> int:
    """Samples that form a run (`calibrate.workers`), of so many samples."""
    return max(1, -(-count // RUNS))


def neighbours(
    inputs: Sequence[Tensor], samples: Sequence[int], run: int, most: int
) -> list[list[int]]:
    """Samples in groups of one shape, each within a run of so many, of at most so many numbers."""
    found: list[list[int]] = []
    for sample in samples:
        own, last = inputs[sample], found[-1] if found else [sample]
        alike = own.shape == inputs[last[0]].shape and sample // run == last[0] // run
        if found and alike and (1 + len(last)) * own.numel() <= most:
            last.append(sample)
        else:
            found.append([sample])
    return found


def stacked(inputs: Sequence[Tensor]) -> Tensor:
    """Inputs of one shape as one [inputs, ...]; a single one as it is."""
    return inputs[0] if len(inputs) == 1 else torch.stack(tuple(inputs))


def passed_through(
    inputs: Sequence[Sequence[Tensor]], step: Callable[[Tensor], Tensor], device: torch.device
) -> list[Tensor]:
    """What `step` makes of each input, in the host's memory.

    On a GPU the next inputs come and the last results go while `step` works: on streams of their
    own, two steps' at a time, so that as many are in its memory.

    Args:
        inputs: Those of each step, in the host's memory.
        step: Takes inputs on the device, `stacked`, and gives results there, likewise.
    """

    def apart(out: Tensor, count: int) -> Sequence[Tensor]:
        return (out,) if count == 1 else out.unbind()

    if device.type != "cuda":
        return [x for own in inputs for x in apart(step(stacked(own)), len(own))]
    work = torch.cuda.current_stream(device)
    coming, going = torch.cuda.Stream(device), torch.cuda.Stream(device)
    results: list[Tensor] = []
    left: list[Any] = []  # events

    def fetch(index: int) -> tuple[list[Tensor], Any]:
        with torch.cuda.stream(coming):
            there = [x.to(device, non_blocking=True) for x in inputs[index]]
            return there, coming.record_event()

    ahead = [fetch(0)] if inputs else []
    for index in range(len(inputs)):
        there, arrived = ahead.pop()
        if index + 1 < len(inputs):
            ahead.append(fetch(index + 1))
        work.wait_event(arrived)
        for x in there:
            x.record_stream(work)
        out = step(stacked(there))
        going.wait_stream(work)
        with torch.cuda.stream(going):
            for x in apart(out, len(there)):
                host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                results.append(host.copy_(x, non_blocking=True))
            out.record_stream(going)
            left.append(going.record_event())
        if index:
            left[index - 1].synchronize()  # no more are under way
    going.synchronize()
    return results


def zeros_for(part: Tensor, device: torch.device | None) -> Tensor:
    """A total for `add_beside`, on a device; on that of the part for None."""
    total = torch.zeros_like(part, device=device)
    if device is not None and total.is_cuda:
        stream = _sums_stream(total.device)
        stream.wait_stream(torch.cuda.current_stream(total.device))
    return total


def add_beside(total: Tensor, part: Tensor) -> None:
    """Add a part to a total, which may be on another GPU; `wait_for_sums` comes before it is read.

    Neither GPU waits for what the other is at. Sums on one GPU follow each other in the order of
    the calls, which no two threads make at once.

    Args:
        total: On any device, from `zeros_for`.
        part: Of the same shape; it may be changed as soon as this returns.
    """
    if not total.is_cuda:
        total.add_(part.to(total.device))
        return
    stream, work = _sums_stream(total.device), torch.cuda.current_stream(total.device)
    if part.device != total.device:
        with torch.cuda.stream(stream):
            total.add_(part.to(total.device))  # copied on the part's own stream
        return
    stream.wait_stream(work)
    with torch.cuda.stream(stream):
        total.add_(part)
    work.wait_stream(stream)


def wait_for_sums(total: Tensor) -> None:
    """Let what comes next on a total's device see all that was added to it."""
    if total.is_cuda:
        torch.cuda.current_stream(total.device).wait_stream(_sums_stream(total.device))


@cache
def _sums_stream(device: torch.device) -> Any:
    """The stream of a GPU on which parts are added to totals there."""
    return torch.cuda.Stream(device)
