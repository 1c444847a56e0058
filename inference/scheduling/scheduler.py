"""Which sequences run in the next step, and how many of their tokens; pure: no clock, no tensors.

A step takes one token of each running sequence whose others are computed. The prompts, of running
sequences and of the first that wait and would find a place, share the rest of the step
(`inference.scheduling.prompt_share`), as long as blocks last. When a running sequence finds no
block, the one that began last gives its blocks up and waits at the head of the queue, to be
computed again.

A sequence begins after what the cache holds of its tokens already. What it computes can be found
by others: its prompt from the step on that computes it, what it generated when it leaves, for
whichever reason, unless its logits were not finite. While a running sequence is computing what a
waiting one begins with, that one waits for it, and lets others by.

Running sequences are rows of arrays (`inference.scheduling.batch`), and are looked at one by one
only where they come or go or get blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from formats.errors import EngineError
from inference.scheduling.batch import Bools, Ints, RunningBatch
from inference.scheduling.blocks import BlockManager, blocks_for
from inference.scheduling.prefix_tree import Key
from inference.scheduling.prompt_share import ChunkedPrefill, Prompt
from inference.scheduling.sequence import MASKED_DRAFTS, Sequence
from inference.scheduling.states import whole_pieces
from inference.scheduling.work import Work, fitting
from kernels.op_inputs import KV_BLOCK

if TYPE_CHECKING:
    from inference.speculate.decoder import SpeculativeDecoder

WINDOW = 16  # waiting sequences whose prompts may share a step


class Scheduler:
    """Queues of sequences.

    Args:
        max_batch_size: Most running sequences.
        max_batched_tokens: Most tokens of a step.
        root: Under which the cache finds what this model computes; see `BlockManager`.
        span: As of `ChunkedPrefill`, as is `target_s`.

    Attributes:
        prefill: Says how many tokens prompts have in a step.
        drafter: Gives drafts of the next tokens, for what room prompts leave in a step, if any.
        roots: The same of what is computed with an adapter, by the adapter's slot.
        waiting: Sequences that wait, in the order in which they are admitted.
        running: Those that run, in the order in which they began.
        queried_tokens: Tokens of sequences when they began, all in all.
        hit_tokens: Those of them that the cache held.
        found: The same by sequence, of those that began since who counts them took it.
        preemptions: Times that a sequence gave its blocks up.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_batch_size: int,
        max_batched_tokens: int,
        root: int = 0,
        span: float = math.inf,
        target_s: float | None = None,
    ) -> None:
        self.blocks, self.root, self.prefill = blocks, root, ChunkedPrefill(span, target_s)
        self.roots: dict[int, int] = {}
        self.drafter: SpeculativeDecoder | None = None
        self.max_batch_size, self.max_batched_tokens = max_batch_size, max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.batch = RunningBatch(max_batch_size)
        self.batch.states = self._states = blocks.states
        self.queried_tokens = self.hit_tokens = self.preemptions = 0
        self.found: dict[str, int] = {}
        self._kept = 0  # places that running sequences keep for forks
        self._arrived = 0

    @cached_property
    def order(self) -> Ints:
        """Places of the running sequences, in the order in which they began."""
        return np.array([sequence.place for sequence in self.running], np.int64)

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
        if source.place is None:
            return self._requeue(new)
        self._kept -= promised
        if len(self.running) + self._kept >= self.max_batch_size:
            return self._requeue(new)
        new.computed = source.computed
        self.blocks.fork(source.name, new.name, source.computed)
        place = self._enter(new, after=source)
        if self._states is not None:
            self._states.copy(source.place, place)
        return None

    def assume_computed(self, sequence: Sequence) -> bool:
        """Run a waiting sequence as if all its tokens but the last were computed.

        Their K and V are what its blocks hold. False, and nothing has changed, where there is no
        place or not enough blocks.
        """
        full = len(self.running) >= self.max_batch_size
        if full or not self.blocks.grow(sequence.name, len(sequence)):
            return False
        self.waiting.remove(sequence)
        self._enter(sequence)
        sequence.computed = len(sequence) - 1
        sequence.cacheable = False
        return True

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Drop a sequence, wherever it is, and take its blocks back.

        Args:
            sequence: Waiting or running.
            failed: Its logits were not finite: nothing that it computed may be found again.
        """
        if sequence.place is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        self._release(sequence, failed=failed)

    def look_ahead(self, work: Work) -> Work | None:
        """The step after a step of drafts that runs on a device, as if none were accepted.

        Where its tokens stand, which depends on that, and its drafts are all that is not known of
        it. Blocks are taken for it, however many are accepted. None where more may change: requests
        wait, or a sequence may end, shares blocks, is not computed yet or has its next token chosen
        by the host or under a mask.
        """
        batch, places = self.batch, work.places
        waits = self.waiting or self.blocks.shares_partly_filled
        waits = waits or self._states is not None  # whose rows for drafts are chosen later
        if self.drafter is None or waits or not np.array_equal(places, self.order):
            return None
        if work.prompt_tokens or work.needs_host.any() or not work.samples.all():
            return None
        length = work.starts + 2 + work.drafts  # if all are accepted
        most = batch.terms.last[places] - length
        if most.min() < 1:
            return None
        room = max(0, self.max_batched_tokens - len(places))
        drafts = self.drafter.plan_ahead(batch, places, most, room)
        if not drafts.any() or (self._with_blocks(places, length, drafts) < drafts).any():
            return None
        return replace(work, starts=work.starts + 1, counts=1 + drafts, drafts=drafts)

    def schedule(self, ahead: Work | None = None) -> Work:
        """Choose the next step's work; blocks for it are taken.

        Args:
            ahead: What `look_ahead` gave for it, if the step before has ended since.
        """
        batch, order = self.batch, self.order
        if ahead is not None:
            same = len(ahead) == len(order) and ahead.alive().all()
            if same and not self.waiting:
                return self._drafted(ahead)
        left = batch.length[order] - batch.computed[order]
        counts = np.where(np.cumsum(left == 1) <= self.max_batched_tokens, left == 1, 0)
        waiting = self._first_to_start()
        if waiting or (left > 1).any():
            going, starting = self._share(left, int(counts.sum()), waiting)
            counts[left > 1] = going
        else:
            starting = []
        self._take_blocks(counts)
        if len(self.running) < len(order):  # some have given way
            order, counts, starting = self.order, counts[: len(self.running)], []
        places, more = self._start_all(zip(waiting, starting, strict=False))
        while not places and not counts.any() and self._all_wait_for_one_that_waits():
            self._preempt(max(self.running, key=lambda s: s.order))
            order, counts = order[:0], counts[:0]  # none of them runs now
            first = self._first_to_start()[:1]
            places, more = self._start_all((s, self.max_batched_tokens) for s in first)
        if places:
            order, counts = np.append(order, places), np.append(counts, more)
        runs = counts > 0  # else its last token is on its way, or the step is full
        order, counts = order[runs], counts[runs]
        drafts = self._draft(order, counts)
        if self._states is not None:
            some = drafts > 0
            columns = (order, batch.length[order], drafts)
            self._states.keep_before(zip(*(x[some].tolist() for x in columns), strict=True))
        return Work.of(batch, order, counts, drafts)

    def repeat(self, work: Work) -> Work | None:
        """The step after a plain one that is on its way, if it is the same, each token one further
        on; blocks for it are taken. None where it has to be scheduled.
        """
        batch, places, order = self.batch, work.places, self.order
        others = self.waiting or self.drafter is not None or self._states is not None
        if others or self.blocks.shares_partly_filled or not work.plain:
            return None
        if len(order) != len(places) or not ((order == places) & work.alive()).all():
            return None
        length = batch.length[places]
        if (length != work.starts + 2).any():  # one has its last token
            return None
        if (length > batch.held[places] * KV_BLOCK).any():
            if not self.unhindered:
                return None
            self._take_blocks(work.counts)
        return work.moved(work.counts)

    def advance(self, work: Work) -> None:
        """Note that a step's work is done, or on its way to the device before any other's."""
        batch, places = self.batch, work.places
        batch.computed[places] = work.starts + work.counts - work.drafts
        for place in places[work.starts < batch.promised[places]].tolist():
            self.blocks.note_computed(batch.names[place], int(batch.computed[place]))
        wanted = {} if self._states is None else self._states.wanted
        for place in work.places.tolist() if wanted else ():
            sequence = batch.sequences[place]
            if sequence is not None and wanted.get(place):
                known = batch.ids[place, : batch.computed[place]].tolist()
                self.blocks.note_states(place, known, self._root_of(sequence))

    def recompute(self, place: int) -> None:
        """Compute the sequence at a place again; nothing of what its blocks hold is used again."""
        sequence = self.batch.sequences[place]
        assert sequence is not None
        sequence.cacheable = False
        self._preempt(sequence)
        sequence.cacheable = True

    def note_time(self, work: Work, seconds: float) -> None:
        """Learn how long a step took, to choose how many tokens of prompts the next ones have, and
        how many drafts."""
        if self.drafter is not None:
            self.drafter.note_time(work, seconds)
        if self.prefill.target_s is not None:
            self.prefill.note_time(work, seconds)

    @property
    def unhindered(self) -> bool:
        """Whether all running sequences find the blocks that they need next."""
        missing = self._missing(self.batch.length[self.order])
        return int(missing.sum()) <= self.blocks.available

    def enter_apart(self, sequence: Sequence) -> bool:
        """Have a sequence at the spare place, with blocks for all its tokens; False without."""
        if not self.blocks.grow(sequence.name, len(sequence)):
            return False
        self._fill(sequence, 0)
        self.batch.enter(sequence, self.batch.spare)
        self.batch.set_table(self.batch.spare, self.blocks.table(sequence.name))
        return True

    def leave_apart(self, sequence: Sequence, seen: int) -> None:
        """Take that place and its blocks back; `seen` as in `BlockManager.release`."""
        self.batch.leave(sequence)
        self.blocks.release(sequence.name, seen=seen)

    def check(self) -> None:
        """Check that running sequences stand in their rows with the blocks that they hold.

        Raises:
            EngineError: they do not.
        """
        for sequence in self.running:
            place, table, batch = sequence.place, self.blocks.table(sequence.name), self.batch
            row = [] if place is None else batch.tables[place, : batch.held[place]].tolist()
            if place is None or batch.sequences[place] is not sequence or row != table:
                raise EngineError(f"{sequence.name} holds blocks {table}, its row says {row}")

    @property
    def wants_drafts(self) -> bool:
        """Whether the next step may have drafts, once tokens that are on their way are known."""
        if self.drafter is None or len(self.order) >= self.max_batched_tokens:
            return False
        wanted = self.drafter.wants(len(self.order))
        return wanted and bool(self._may_have_drafts(self.order).any())

    def _may_have_drafts(self, places: Ints) -> Bools:
        """Which sequences have one token to compute, and need not stop with the next."""
        batch = self.batch
        length = batch.length[places]
        able = (batch.computed[places] + 1 == length) & (length < batch.terms.last[places])
        if self._states is not None:  # a step keeps the states before drafts, and no others beside
            able &= (length > 1) & ~np.isin(places, self._states.keeping)
        return able & ~(batch.held_by_client[places] | batch.whole[places])

    def _drafted(self, ahead: Work) -> Work:
        """What `look_ahead` gave, at where its tokens stand now, with as many drafts as found."""
        batch, places, some = self.batch, ahead.places, ahead.drafts > 0
        drafts = ahead.drafts.copy()
        assert self.drafter is not None
        drafts[some] = self.drafter.propose(batch, places[some], drafts[some])
        if (drafts == ahead.drafts).all():
            return ahead.moved(batch.computed[places] - ahead.starts)
        return Work.of(batch, places, np.ones_like(places), drafts)

    def _draft(self, places: Ints, counts: Ints) -> Ints:
        """How many drafts each of a step's sequences has; they are in their rows then."""
        drafts, batch = np.zeros_like(places), self.batch
        if self.drafter is None or not self.drafter.wants(len(self.order)):
            return drafts
        length = batch.length[places]
        able = (counts == 1) & self._may_have_drafts(places) & (batch.known[places] == length)
        room = max(0, self.max_batched_tokens - int(counts.sum()))
        room = room if self._states is None else min(room, self._states.drafts)
        most = np.minimum(batch.terms.last[places] - length, self.max_batched_tokens)
        # Tokens until a device chooses; both do not choose in one step.
        host = batch.terms.host_until[places] - length
        most = np.where(host > 0, np.minimum(most, host - 1), most)[able]
        wanted = self.drafter.plan(batch, places[able], most, room)
        if not wanted.any():
            return drafts
        wanted = _few_masks(batch, places[able], wanted)
        drafts[able] = self._with_blocks(places[able], length[able], wanted)
        some = np.flatnonzero(drafts)
        if len(some):
            drafts[some] = self.drafter.propose(batch, places[some], drafts[some])
        return drafts

    def _with_blocks(self, places: Ints, length: Ints, drafts: Ints) -> Ints:
        """Get blocks for drafts after so many tokens, or have fewer drafts: none for which another
        sequence might give way."""
        batch, drafts = self.batch, drafts.copy()
        for i in np.flatnonzero(batch.missing(places, length + drafts)).tolist():
            place, tokens = int(places[i]), int(length[i] + drafts[i])
            name, held = batch.names[place], int(batch.held[place])
            spare = self.blocks.available - self.blocks.missing(name, tokens)
            if spare >= len(self.running) and self.blocks.grow(name, tokens):
                batch.set_table(place, self.blocks.table(name), held)
            else:
                drafts[i] = held * KV_BLOCK - int(length[i])
        return drafts

    def _missing(self, tokens: Ints) -> Ints:
        """Blocks that running sequences lack to hold so many tokens each, the last one written."""
        if not self.blocks.shares_partly_filled:
            return self.batch.missing(self.order, tokens)
        wanted = zip(self.running, tokens.tolist(), strict=True)
        return np.array([self.blocks.missing(s.name, count) for s, count in wanted], np.int64)

    def _take_blocks(self, counts: Ints) -> None:
        """Get blocks for running sequences; some may have to give way."""
        wanted = self.batch.computed[self.order] + counts
        lacking = self._missing(wanted) > 0
        for position in np.flatnonzero(lacking & (counts > 0)).tolist():
            if position >= len(self.running):
                return  # it gave way itself, as all after it
            self._make_room(self.running[position], int(wanted[position]))

    def _make_room(self, sequence: Sequence, tokens: int) -> None:
        """Get blocks for a running sequence, at the cost of those that arrived last."""
        while not self.blocks.grow(sequence.name, tokens):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return
        place = sequence.place
        assert place is not None
        before = max(0, int(self.batch.held[place]) - 1)  # the last one may be another one now
        self.batch.set_table(place, self.blocks.table(sequence.name), before)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's place and blocks; it waits, and will be computed again."""
        self._leave(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait before those that arrived after it."""
        later = (i for i, other in enumerate(self.waiting) if other.order > sequence.order)
        self.waiting.insert(next(later, len(self.waiting)), sequence)

    def _all_wait_for_one_that_waits(self) -> bool:
        """Whether nothing goes on: held sequences run that wait for others, which find no room."""
        return bool(self.waiting and self.running) and all(s.held for s in self.running)

    def _share(
        self, left: Ints, decodes: int, waiting: list[Sequence]
    ) -> tuple[list[int], list[int]]:
        """Tokens of each prompt in a step: of running ones, and of those that could begin.

        Args:
            left: Tokens of each running sequence that are not computed.
            decodes: Running sequences that compute one token.
            waiting: Sequences that could begin.
        """
        computed = self.batch.computed[self.order].tolist()
        prompts = [
            Prompt(sequence.order, count, computed[i], sequence.prompt)
            for i, (sequence, count) in enumerate(zip(self.running, left.tolist(), strict=True))
            if count > 1
        ]
        for sequence in waiting:
            done = max(sequence.beginning.computed, sequence.given)
            left_over = len(sequence) - done
            prompts.append(Prompt(sequence.order, left_over, done, sequence.prompt))
        piece = 0 if self._states is None else self._states.piece
        room = self.max_batched_tokens - decodes
        shares = self.prefill.shares(prompts, room, decodes, piece)
        return shares[: len(shares) - len(waiting)], shares[len(shares) - len(waiting) :]

    def _first_to_start(self) -> list[Sequence]:
        """The first of the waiting sequences that would find places and need not wait."""
        room = self.max_batch_size - len(self.running) - self._kept
        blocks = self.blocks.available if self.running else math.inf
        found: list[Sequence] = []
        begun: set[Key | None] = set()  # what they will have promised
        for sequence in self.waiting if room > 0 else ():
            if sequence.places > room or len(found) == WINDOW:
                break
            if self._awaits_another(sequence) or sequence.beginning.following in begun:
                continue
            blocks -= blocks_for(len(sequence) + 1 - sequence.beginning.computed)
            if blocks < 0:  # it would soon push others out; who comes later does not pass it
                break
            found.append(sequence)
            room -= sequence.places
            begun |= {sequence.beginning.following} - {None}
        return found

    def _start_all(self, shares: Iterable[tuple[Sequence, int]]) -> tuple[list[int], list[int]]:
        """Let waiting sequences run, each with its share: their places, and their tokens."""
        places, counts = [], []
        for sequence, share in shares:
            if not share:
                continue
            count = self._start(sequence, share)
            if not count:
                break
            self.waiting.remove(sequence)
            places.append(self._enter(sequence))
            tokens, root = sequence.known_from(0), self._root_of(sequence)
            self.blocks.begin_state(sequence.name, places[-1], tokens[: sequence.prompt], root)
            counts.append(count)
        return places, counts

    def _awaits_another(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute what a waiting one begins with.

        It ends with the last block that they share, or where the other one leaves or is preempted:
        what it promised is withdrawn then.
        """
        if sequence.findable == 0:
            return False
        coming, promises = sequence.beginning.coming, self.blocks.promises
        if self.blocks.is_coming(coming) if coming else sequence.looked_up == promises:
            return coming is not None
        sequence.beginning = self.blocks.look_up(self._findable(sequence), self._root_of(sequence))
        sequence.looked_up = promises
        return sequence.beginning.coming is not None

    def _findable(self, sequence: Sequence) -> list[int]:
        """Those of a waiting sequence's tokens that it may share with others."""
        tokens, count = sequence.tokens, sequence.findable
        if self._states is not None:  # what comes after its prompt is computed otherwise
            whole = sequence.prompt // KV_BLOCK * KV_BLOCK + 1
            count = whole if count is None else min(count, whole)
        return tokens if count is None else tokens[:count]

    def _root_of(self, sequence: Sequence) -> int:
        """Under which the cache finds what is computed for a sequence."""
        return self.roots.get(sequence.terms.adapter, self.root)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Get blocks for the first tokens of a waiting sequence; how many, 0 if there are none."""
        name, tokens = sequence.name, sequence.tokens
        hit = self.blocks.take_prefix(name, self._findable(sequence), self._root_of(sequence))
        done = max(hit, sequence.given)
        wanted, count = self.blocks.missing(name, len(tokens) + 1), min(len(tokens) - done, budget)
        if self._states is not None:
            count = whole_pieces(hit, count, sequence.prompt, self._states.piece)
            if not count:  # less is found than when it was looked up
                sequence.looked_up = -1
        pushes = self.running and wanted > self.blocks.available  # it would soon push others out
        if not count or pushes or not self.blocks.grow(name, done + count):
            self.blocks.release(name)
            return 0
        self._fill(sequence, hit)
        own = tokens if self._states is None else tokens[: sequence.prompt]
        sequence.promised = self.blocks.promise(name, own, self._root_of(sequence))
        self.queried_tokens += len(tokens)
        self.hit_tokens += hit
        self.found[name] = hit
        return count

    def _fill(self, sequence: Sequence, found: int) -> None:
        """Note how many first tokens are done: those found in the cache, and what is given."""
        sequence.computed = max(found, sequence.given)
        if found < sequence.given:
            own = range(found, sequence.given)
            self.blocks.fill(sequence.name, sequence.terms.adapter, own)

    def _enter(self, sequence: Sequence, after: Sequence | None = None) -> int:
        """Give a sequence that has its blocks a place; in order last, or after another."""
        place = self.batch.enter(sequence)
        self.batch.set_table(place, self.blocks.table(sequence.name))
        at = len(self.running) if after is None else self.running.index(after) + 1
        self.running.insert(at, sequence)
        self._kept += sequence.places - 1
        self.__dict__.pop("order", None)
        return place

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence's place."""
        if self._states is not None and sequence.place is not None:
            self._states.give_up(sequence.place)
        self.batch.leave(sequence)
        self.running.remove(sequence)
        self._kept -= sequence.places - 1
        self.__dict__.pop("order", None)

    def _release(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take the blocks of a sequence without a place back; others find what it computed."""
        if failed or not sequence.cacheable:
            self.blocks.discard(sequence.name)
            return
        tokens = sequence.tokens[: sequence.computed]
        if self._states is not None:  # of what follows it no state is kept
            tokens = tokens[: sequence.prompt]
        self.blocks.release(sequence.name, tokens, sequence.seen, self._root_of(sequence))


def _few_masks(batch: RunningBatch, places: Ints, drafts: Ints) -> Ints:
    """As many drafts, or fewer where a constraint's masks, one for each draft, are too many."""
    masked = np.where(batch.terms.masked[places], drafts, 0)
    if not masked.any():
        return drafts
    return np.where(masked > 0, fitting(masked, MASKED_DRAFTS), drafts)
