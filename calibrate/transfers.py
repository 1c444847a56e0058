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


def passed_through(
    inputs: Sequence[Tensor], step: Callable[[Tensor], Tensor], device: torch.device
) -> list[Tensor]:
    """What `step` makes of each input, in the host's memory.

    On a GPU the next input comes and the last result goes while `step` works: on streams of their
    own, two samples at a time, so that as many are in its memory.

    Args:
        inputs: In the host's memory.
        step: Takes an input on the device, and gives a result there.
    """
    if device.type != "cuda":
        return [step(x) for x in inputs]
    work = torch.cuda.current_stream(device)
    coming, going = torch.cuda.Stream(device), torch.cuda.Stream(device)
    results: list[Tensor] = []
    left: list[Any] = []  # events

    def fetch(index: int) -> tuple[Tensor, Any]:
        with torch.cuda.stream(coming):
            there = inputs[index].to(device, non_blocking=True)
            return there, coming.record_event()

    ahead = [fetch(0)] if inputs else []
    for index in range(len(inputs)):
        there, arrived = ahead.pop()
        if index + 1 < len(inputs):
            ahead.append(fetch(index + 1))
        work.wait_event(arrived)
        there.record_stream(work)
        out = step(there)
        going.wait_stream(work)
        with torch.cuda.stream(going):
            host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            results.append(host.copy_(out, non_blocking=True))
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
