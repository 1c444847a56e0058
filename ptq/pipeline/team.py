"""Devices that take a block's layers and smoothing groups between them; each has the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from calibrate.workers import BlockWorkers, Task
from ptq.methods.common.block import BlockWork
from ptq.methods.common.events import Event
from ptq.methods.common.method import Method, Part, layer_parts

T = TypeVar("T")


class Team(BlockWorkers):
    """Workers that solve parts of a block side by side, too."""

    def solve(self, work: BlockWork, method: Method, name: str) -> None:
        """`Method.solve`, by parts where it falls into some.

        Args:
            work: The block at work.
            method: Prepared for it.
            name: What a person calls it.
        """
        known = len(work.events)
        parts = method.parts(work, len(self)) if len(self) > 1 else []
        if len(parts) < 2:
            method.solve(work)
        else:
            solved = self.over(parts, work, name, partial(_solved, method))
            method.gather(work, [own for own, _ in solved])
            for _, part in solved:
                work.events += part.events
                work.smoothing += part.smoothing
        work.events[known:] = _in_order(work, work.events[known:])

    def over_layers(self, work: BlockWork, what: str, run: Callable[[BlockWork], T]) -> list[T]:
        """What `run` gives for parts of a block's layers, on their devices, in no certain number.

        Args:
            work: The block at work.
            what: Name of the work in the message of an error.
            run: Looks at the targets of what it gets alone.
        """
        if len(self) == 1:
            return [run(work)]
        return self.over(layer_parts(work, len(self)), work, what, run)

    def over(
        self, parts: Sequence[Part], work: BlockWork, what: str, run: Callable[[BlockWork], T]
    ) -> list[T]:
        """What `run` gives for each part of a block; arguments as of `over_layers`."""

        def task(part: Part, worker: int) -> T:
            return run(work.part(self.block(worker), part.targets, part.groups))

        return self.spread([Task(f"{what} of {p.title}", p.cost, partial(task, p)) for p in parts])


def _solved(method: Method, part: BlockWork) -> tuple[Method, BlockWork]:
    """A part of a block, solved by a copy of the method."""
    own = method.part(part)
    own.solve(part)
    return own, part


def _in_order(work: BlockWork, events: Sequence[Event]) -> list[Event]:
    """Events once each, in the order of the layers that they are of, however these were solved."""
    place = {name: i for i, name in enumerate(work.targets)}
    return sorted(dict.fromkeys(events), key=lambda event: place.get(event.module, -1))


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let products of fp32 matrices run in TF32: far faster, and finer than bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
