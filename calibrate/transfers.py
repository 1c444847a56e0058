"""Hidden states on their way between the host's memory and a GPU, beside the work on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        device: Where.
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
