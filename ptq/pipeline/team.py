"""Devices that take a block's samples, layers and groups between them; each has the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from calibrate.block import DecoderBlock
from ptq.methods.common.block import BlockWork
from ptq.methods.common.events import Event
from ptq.methods.common.method import Method
from ptq.methods.common.parts import Part, layer_parts
from ptq.pipeline.workers import Task, Workers

T = TypeVar("T")


class Team(Workers):
    """Workers with copies of one block, the block itself on the first device.

    Copies are made before the work begins, while nobody looks at the block's layers, and again once
    it has changed. On one device all share the weights.

    Args:
        devices: Where they work.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._blocks: list[DecoderBlock] = []

    def take(self, block: DecoderBlock) -> None:
        """Begin to work on a block, or on what a method has made of it."""
        self._blocks = [block, *(block.to(device) for device in self.devices[1:])]

    def leave(self) -> None:
        """Free the copies: the block is done."""
        self._blocks = []

    def block(self, worker: int) -> DecoderBlock:
        """The block, for a worker."""
        return self._blocks[worker]

    def solve(self, work: BlockWork, method: Method, name: str) -> None:
        """`Method.solve`, by parts where it falls into some.

        Args:
            work: The block at work.
            method: Prepared for it.
            name: What a person calls it.
        """
        told = len(work.events)
        parts = method.parts(work, len(self)) if len(self) > 1 else []
        if len(parts) < 2:
            method.solve(work)
        else:
            solved = self.over(parts, work, name, partial(_solved, method))
            method.gather(work, [own for own, _ in solved])
            for _, part in solved:
                work.events += part.events
                work.smoothing += part.smoothing
        work.events[told:] = _in_order(work, work.events[told:])

    def over_layers(self, work: BlockWork, told: str, run: Callable[[BlockWork], T]) -> list[T]:
        """What `run` gives for parts of a block's layers, on their devices, in no certain number.

        Args:
            work: The block at work.
            told: What is done, for the message of an error.
            run: Looks at the targets of what it gets alone.
        """
        if len(self) == 1:
            return [run(work)]
        return self.over(layer_parts(work, len(self)), work, told, run)

    def over(
        self, parts: Sequence[Part], work: BlockWork, told: str, run: Callable[[BlockWork], T]
    ) -> list[T]:
        """What `run` gives for each part of a block; arguments as of `over_layers`."""

        def task(part: Part, worker: int) -> T:
            return run(work.part(self.block(worker), part.targets, part.groups))

        return self.spread([Task(f"{told} of {p.told}", p.cost, partial(task, p)) for p in parts])


def _solved(method: Method, part: BlockWork) -> tuple[Method, BlockWork]:
    """A part of a block, solved by a copy of the method."""
    own = method.part(part)
    own.solve(part)
    return own, part


def _in_order(work: BlockWork, events: Sequence[Event]) -> list[Event]:
    """Events once each, in the order of the layers that they are of, however these were solved."""
    place = {name: i for i, name in enumerate(work.targets)}
    return sorted(dict.fromkeys(events), key=lambda event: place.get(event.module, -1))
