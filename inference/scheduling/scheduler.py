"""Which sequences run in the next step, and how many of their tokens; pure: no clock, no tensors.

First come, first served. A step takes running sequences in the order of their arrival, one token
each, or a chunk of what is not computed yet; then admits waiting ones as long as tokens, places and
blocks last. When a running sequence finds no block, the one that arrived last gives its blocks up
and waits at the head of the queue, to be computed again.

A sequence begins behind what the cache holds of its tokens already. What it computes can be found
by others: its prompt from the step on that computes it, what it generated when it leaves, for
whichever reason, unless its logits were not finite. While a running sequence is computing what a
waiting one begins with, that one waits for it, and lets others by.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

from inference.scheduling.blocks import BlockManager
from inference.scheduling.prefix_tree import Node

PENDING = -1  # a token that is being computed, and not known yet


@dataclass(eq=False)
class Sequence:
    """Tokens of one request and how far they are computed.

    Attributes:
        name: The request's.
        tokens: Prompt and output; the last may be `PENDING`.
        computed: Tokens whose K and V are in the cache.
        preemptions: Times that it gave its blocks up.
        takes_hits: Whether it may begin behind what is cached; not while the logits of its prompt
            are wanted.
        cacheable: Whether what its blocks hold are its tokens' K and V.
        awaits: The last of the blocks that another one is computing, with the same tokens.
        promised: How many of its first tokens others can find as soon as they are computed.
        prompt: How many tokens its prompt has.
        held: Whether a client chooses its tokens: it may be idle, and wait for others of its kind.
        places: Places that it keeps while it runs: its own, and those of what is forked from it.
        order: When it arrived, or what it was forked from; of preempted ones the first goes first.
    """

    name: str
    tokens: list[int]
    computed: int = 0
    preemptions: int = 0
    takes_hits: bool = True
    cacheable: bool = True
    promised: int = 0
    awaits: Node | None = None
    held: bool = False
    places: int = 1
    order: int = 0
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def known(self) -> int:
        """Tokens that are not pending."""
        return len(self.tokens) - (self.tokens[-1] == PENDING)

    @property
    def seen(self) -> int:
        """Tokens whose K and V have given logits that were looked at: all before the newest."""
        return self.known - 1 if self.known > self.prompt else 0

    def fork(self, name: str) -> Sequence:
        """Another one with the same tokens, of which nothing is computed yet."""
        other = copy.copy(self)
        other.name, other.tokens, other.places = name, self.tokens.copy(), 1
        other.computed = other.promised = other.preemptions = 0
        other.awaits = None
        return other


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
        root: Under which the cache finds what this model computes; see `BlockManager`.

    Attributes:
        queried_tokens: Tokens of sequences when they began, all in all.
        hit_tokens: Those of them that the cache held.
        preemptions: Times that a sequence gave its blocks up.
    """

    blocks: BlockManager
    max_batch_size: int
    max_batched_tokens: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    root: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    _kept: int = 0  # places that running sequences keep for forks
    _arrived: int = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._arrived += 1
        sequence.order = self._arrived
        self.waiting.append(sequence)

    def fork(self, source: Sequence, new: Sequence) -> None:
        """Run a sequence that begins with the tokens of a held one, on the same blocks.

        Where that one waits, or no place is left, the new one waits and is computed again.
        """
        promised = source.places > 1
        source.places -= promised
        if source not in self.running:
            return self._requeue(new)
        self._kept -= promised
        if len(self.running) + self._kept >= self.max_batch_size:
            return self._requeue(new)
        new.computed = source.computed
        self.blocks.fork(source.name, new.name, source.computed)
        self.running.insert(self.running.index(source) + 1, new)
        return None

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
        sequence.cacheable = False
        return True

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Drop a sequence, wherever it is, and take its blocks back.

        Args:
            sequence: Waiting or running.
            failed: Its logits were not finite: nothing that it computed may be found again.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            self._kept -= sequence.places - 1
        else:
            self.waiting.remove(sequence)
        self._release(sequence, failed=failed)

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
        while not slices and self.waiting and self.running and all(s.held for s in self.running):
            self._preempt(max(self.running, key=lambda s: s.order))  # each waits for one that waits
            self._admit(slices, budget)
        return slices

    def advance(self, slices: list[Slice]) -> None:
        """Note that a step's work is done, or on its way to the device before any other's."""
        for part in slices:
            sequence = part.sequence
            sequence.computed = part.start + part.count
            if part.start < sequence.promised:
                self.blocks.note_computed(sequence.name, sequence.computed)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Get blocks for a running sequence, at the cost of those that arrived last."""
        while not self.blocks.grow(sequence.name, tokens):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's place and blocks; it waits, and will be computed again."""
        self.running.remove(sequence)
        self._kept -= sequence.places - 1
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait before those that arrived after it."""
        later = (i for i, other in enumerate(self.waiting) if other.order > sequence.order)
        self.waiting.insert(next(later, len(self.waiting)), sequence)

    def _admit(self, slices: list[Slice], budget: int) -> None:
        for sequence in tuple(self.waiting):
            full = len(self.running) + self._kept + sequence.places > self.max_batch_size
            if budget == 0 or full:
                return
            if self._awaits_another(sequence):
                continue
            count = self._start(sequence, budget)
            if not count:
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._kept += sequence.places - 1
            slices.append(Slice(sequence, sequence.computed, count))
            budget -= count

    def _awaits_another(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute what a waiting one begins with.

        It ends with the last block that they share, or where the other one leaves or is preempted:
        what it promised is withdrawn then.
        """
        if not sequence.takes_hits:
            return False
        if sequence.awaits is None or not self.blocks.is_coming(sequence.awaits):
            sequence.awaits = self.blocks.awaited(sequence.tokens, self.root)
        return sequence.awaits is not None

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Get blocks for the first tokens of a waiting sequence; how many, 0 if there are none."""
        name, tokens = sequence.name, sequence.tokens
        hit = self.blocks.take_prefix(name, tokens, self.root) if sequence.takes_hits else 0
        wanted, count = self.blocks.missing(name, len(tokens) + 1), min(len(tokens) - hit, budget)
        pushes = self.running and wanted > self.blocks.available  # it would soon push others out
        if pushes or not self.blocks.grow(name, hit + count):
            self.blocks.release(name)
            return 0
        sequence.computed = hit
        sequence.promised = self.blocks.promise(name, tokens, self.root)
        self.queried_tokens += len(tokens)
        self.hit_tokens += hit
        return count

    def _release(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take the blocks of a sequence back; others can find what it computed."""
        if failed or not sequence.cacheable:
            self.blocks.discard(sequence.name)
            return
        tokens = sequence.tokens[: min(sequence.computed, sequence.known)]
        self.blocks.release(sequence.name, tokens, sequence.seen, self.root)
