"""Samples that several devices run through one block.

What is kept of them is the same, bit for bit, however many devices there are. Maxima and counts do
not depend on the order of samples; sums of floats do. So neighbouring samples form runs, at most
`RUNS` of them whatever the number of devices; a run is summed by the device that takes it, sample
by sample, and then added to the sum of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calibrate.block import DecoderBlock
from calibrate.workers import Workers

RUNS = 16


def run_size(count: int) -> int:
    """Samples that form a run, of so many samples."""
    return max(1, -(-count // RUNS))


def samples_of(worker: int, count: int, workers: int) -> list[int]:
    """Which of `count` samples a worker takes: run i goes to worker i modulo their number."""
    size = run_size(count)
    return [i for i in range(count) if i // size % workers == worker]


def in_order_of_samples(found: Sequence[Sequence[Tensor]], count: int) -> list[Tensor]:
    """What each worker made of its samples, as one list of all `count` samples."""
    each = {
        sample: state
        for worker, states in enumerate(found)
        for sample, state in zip(samples_of(worker, count, len(found)), states, strict=True)
    }
    return [each[sample] for sample in range(count)]


class BlockWorkers(Workers):
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

    def outputs(self) -> list[Tensor]:
        """`DecoderBlock.outputs` of the block, each worker with its samples."""

        def run(worker: int) -> list[Tensor]:
            block = self.block(worker)
            chosen = samples_of(worker, len(block.inputs), len(self))
            return block.outputs(samples=chosen, begin=lambda _: self.check())

        found = self.each(f"running samples through {self.block(0).name}", run)
        return in_order_of_samples(found, len(self.block(0).inputs))
