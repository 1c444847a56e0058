"""Which sequences run in the next step, and how many of their tokens; pure: no clock, no tensors.

First come, first served. A step takes running sequences in the order of their arrival, one token
each, or a chunk of what is not computed yet; then admits waiting ones as long as tokens, places and
blocks last. When a running sequence finds no block, the one that arrived last gives its blocks up
and waits at the head of the queue, to be computed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inference.scheduling.blocks import BlockManager

PENDING = -1  # a token that is being computed, and not known yet


@dataclass(eq=False)
class Sequence:
    """Tokens of one request and how far they are computed.

    Attributes:
        name: The request's.
        tokens: Prompt and output; the last may be `PENDING`.
        computed: Tokens whose K and V are in the cache.
        preemptions: Times that it gave its blocks up.
    """

    name: str
    tokens: list[int]
    computed: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Slice:
    """Tokens [start, start + count) of a sequence, to be computed in a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the sequence's last, so that a new one follows."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass
class Scheduler:
    """Queues of sequences.

    Args:
        blocks: The cache's bookkeeping.
        max_batch_size: Most running sequences.
        max_batched_tokens: Most tokens of a step.
    """

    blocks: BlockManager
    max_batch_size: int
    max_batched_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def assume_computed(self, sequence: Sequence) -> bool:
        """Run a waiting sequence as if all its tokens but the last were computed.

        Their K and V are what its blocks hold. False, and nothing has changed, where there is no
        place or not enough blocks.
        """
        full = len(self.running) >= self.max_batch_size
        if full or not self.blocks.grow(sequence.name, len(sequence.tokens)):
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.computed = len(sequence.tokens) - 1
        return True

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is, and take its blocks back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.name)

    def schedule(self) -> list[Slice]:
        """Choose the next step's work; blocks for it are taken."""
        budget = self.max_batched_tokens
        slices: list[Slice] = []
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count == 0:  # its last token is on its way
                position += 1
                continue
            if not self._make_room(sequence, sequence.computed + count):
                break  # it gave way itself; all after it arrived later and are gone
            slices.append(Slice(sequence, sequence.computed, count))
            budget -= count
            position += 1
        if position == len(self.running):
            self._admit(slices, budget)
        return slices

    def advance(self, slices: list[Slice]) -> None:
        """Note that a step's work is done."""
        for part in slices:
            part.sequence.computed = part.start + part.count

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Get blocks for a running sequence, at the cost of those that arrived last."""
        while not self.blocks.grow(sequence.name, tokens):
            last = self.running.pop()
            self.blocks.release(last.name)
            last.computed = 0
            last.preemptions += 1
            self.waiting.appendleft(last)
            if last is sequence:
                return False
        return True

    def _admit(self, slices: list[Slice], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            wanted = self.blocks.missing(sequence.name, len(sequence.tokens) + 1)
            if self.running and wanted > self.blocks.free:
                return  # it would soon push others out
            count = min(len(sequence.tokens), budget)
            if not self.blocks.grow(sequence.name, count):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            slices.append(Slice(sequence, 0, count))
            budget -= count
