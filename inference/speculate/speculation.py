"""How many drafts a step has: as many as bring the most tokens a second.

What a step of so many rows takes is learned from the steps themselves, apart for those without
drafts and with (a GPU is waited for then), and so is what it takes to draft a chain. Of sizes that
have not run yet a GPU tells what captured steps take when they are warmed up. Drafts of a
sequence are found with probability f, the first is accepted with probability q, and each that
follows with probability p where those before it were: the i-th adds f q p^(i - 1) tokens to a step
on average, and f rows. The drafts of all sequences are taken in the order of these gains as long as
they make

    (tokens of the step) / (seconds of the step)

larger: none, where they do not pay, as in a large batch. Then a few sequences get a few now and
then, so that it is noticed when text becomes one that can be guessed: as often as such trials take
no more than `FOR_TRIALS` of the time, and less in a large batch, where drafts hardly ever pay. What
accepted drafts saved pays for one trial more: one that went well is followed by another. One step
of `PLAIN` has no drafts in any case, so that it stays known what such a step takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from inference.proposers import HiddenStateProposer, Proposer
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.work import Work
from inference.speculate.estimates import OUTLIER, Share, StepTime

Floats = NDArray[np.floating]

MOST_DEPTH = 16  # drafts of a sequence in a step
PLAIN = 64  # steps
FOR_TRIALS = 0.01  # share of the time that trials take where drafts do not pay
TRIED = 8  # sequences, one of which has drafts in a trial
TRIAL = 4  # drafts of it
AT_FIRST = 3  # steps whose time the first trials may take in any case
LEAST_PRICE = 0.15  # of a trial, as a share of a step: planning one takes time, too
MEMORY = 0.85  # weight of the past in p, for each draft that was looked at
MEMORY_OF_FOUND = 0.5  # weight of the past in f: where some are found, some are found behind them
RAREST = 0.02  # least f that is believed
UNCOUNTED = 256  # steps whose drafts are noted before they are counted
MARGIN = 1.08  # tokens a second with drafts, of those without, from which on drafts are made


class Speculation:
    """Drafts for the scheduler; see `inference.scheduling.drafter.Drafter`.

    Args:
        proposer: Makes them.
        places: Most sequences that run at once.
        depth: Drafts of each sequence in every step; None: as many as pay.

    Attributes:
        steps: Times that a sequence had drafts.
        reads: Hidden states of each step that the proposer is told, if any.
    """

    def __init__(self, proposer: Proposer, places: int, depth: int | None = None) -> None:
        self._proposer, self._depth = proposer, depth
        self._reader = proposer if isinstance(proposer, HiddenStateProposer) else None
        self.reads = None if self._reader is None else self._reader.reads
        self._most = MOST_DEPTH if depth is None else depth
        self._found, self._first, self._chance = (np.zeros(places + 1) for _ in range(3))
        self._found_by_all, self._first_of_all, self._chance_of_all = Share(), Share(), Share()
        self._serial = np.full(places + 1, -1, np.int64)
        self._tried = np.zeros(places + 1, np.int64)  # the step in which one was tried last
        self._resting = 0  # as many sequences ran when drafts paid for none; 0: they pay
        self._credit = math.inf  # seconds that trials may take
        self._price = 0.0  # seconds that one takes
        self._step = 0  # which one the next is
        self._drafted = np.full(places + 1, -1, np.int64)  # the last of them that had drafts
        self._plain, self._drafting = StepTime(1.0), StepTime()
        self._verifying = StepTime()  # steps in which drafts were asked for
        self._looked = self._tries = self._asked = False  # in this step
        self._spent = 0.0  # seconds of its drafting
        self._proposed, self._accepted = (np.zeros(self._most, np.int64) for _ in range(2))
        self._uncounted: list[tuple[Ints, Ints]] = []  # drafts of steps, and how many were accepted
        self.steps = 0

    def wants(self, sequences: int) -> bool:
        """`Drafter.wants`."""
        if self._depth is not None:
            return True
        if self._step % PLAIN == 0 or not self._plain.learned:
            return False
        others = abs(sequences - self._resting) * TRIED > self._resting
        return others or self._credit >= self._price

    def plan(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """`Drafter.plan`."""
        most, self._looked = np.minimum(most, self._most), True
        if not most.any():
            return most
        new = self._serial[places] != batch.serial[places]
        fresh = places[new]
        self._found[fresh] = self._found_by_all.mean
        self._first[fresh] = self._first_of_all.mean
        self._chance[fresh] = self._chance_of_all.mean
        self._serial[fresh], self._tried[fresh] = batch.serial[fresh], 0
        wanted = most if self._depth is not None else self._paying_or_tried(places, most)
        return _within(wanted, room)

    def plan_ahead(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """`Drafter.plan_ahead`; none where `plan` would try whether drafts pay."""
        if (self._serial[places] != batch.serial[places]).any():
            return np.zeros_like(most)
        most = np.minimum(most, self._most)
        return _within(most if self._depth is not None else self._paying(places, most), room)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """`Drafter.propose`."""
        if self._depth is not None:
            return self._proposer.propose(batch, places, most)
        start, self._asked = time.perf_counter(), True
        counts = self._proposer.propose(batch, places, most)
        self._spent = time.perf_counter() - start
        if (self._drafted[places] == self._step - 1).all():  # else it had to catch up
            self._drafting.note(int(most.max()), self._spent)
        self._drafted[places] = self._step
        found = MEMORY_OF_FOUND * self._found[places] + (1 - MEMORY_OF_FOUND) * (counts > 0)
        found = np.maximum(found, RAREST)
        self._found[places] = found
        self._found_by_all.note(int(np.count_nonzero(counts)), len(counts))
        return counts

    def note_accepted(self, batch: RunningBatch, work: Work, which: Ints, accepted: Ints) -> None:
        """`Drafter.note_accepted`."""
        drafts, places = work.drafts[which], work.places[which]
        self.steps += len(which)
        self._uncounted.append((drafts, accepted))
        if len(self._uncounted) > UNCOUNTED:
            self._count()
        if self._depth is not None:
            return
        begun = accepted > 0
        self._first[places] = MEMORY * self._first[places] + (1 - MEMORY) * begun
        self._first_of_all.note(int(np.count_nonzero(begun)), len(begun))
        later = np.minimum(accepted, drafts - 1)  # looked at: behind a wrong one nothing is known
        right, past = np.maximum(accepted - 1, 0), MEMORY**later
        own = (1 - past) * right / np.maximum(later, 1)
        self._chance[places] = past * self._chance[places] + own
        self._chance_of_all.note(int(right.sum()), int(later.sum()))
        came, count = int(accepted.sum()), len(work)
        saved = _trial_share(count) * came * self._plain.least(count) / count
        # Of one more trial at the most; this one may be paid for before it or after it.
        self._credit = min(self._credit + saved, max(self._credit, 2 * self._price))

    def learn_times(self, measure: Callable[[], Mapping[int, float]]) -> None:
        """`Drafter.learn_times`."""
        if self._depth is not None:
            return
        seconds = measure()
        for times in (self._plain, self._verifying):
            times.tell(seconds)

    @property
    def proposed(self) -> Ints:
        """How many drafts were verified, by their position in the chain: int64 [depth]."""
        self._count()
        return self._proposed

    @property
    def accepted(self) -> Ints:
        """How many of them were accepted, likewise."""
        self._count()
        return self._accepted

    def _count(self) -> None:
        """Count the drafts that were noted since: not in each step, whose time it would take."""
        noted, self._uncounted = self._uncounted, []
        position = np.arange(self._most)
        for drafts, accepted in noted:
            self._proposed += np.count_nonzero(drafts[:, None] > position, axis=0)
            self._accepted += np.count_nonzero(accepted[:, None] > position, axis=0)

    def note_time(self, work: Work, seconds: float) -> None:
        """`Drafter.note_time`."""
        if self._depth is not None:
            return
        spent, looked, asked, tries = self._spent, self._looked, self._asked, self._tries
        self._spent, self._looked, self._asked, self._tries = 0.0, False, False, False
        self._step += 1
        if work.prompt_tokens:
            return
        if asked:
            self._verifying.note(work.tokens, max(seconds - spent, 1e-9))
        elif not looked:  # else a GPU may have been waited for
            self._plain.note(work.tokens, seconds)
            more = self._credit + FOR_TRIALS * _trial_share(len(work)) * seconds
            self._credit = min(more, max(self._credit, self._price))
        if tries:
            spent = max(spent, self._drafting.least(TRIAL))  # more where it had to catch up
            price = self._price_of(self._verifying.least(work.tokens) + spent, len(work))
            self._credit -= min(price, OUTLIER * self._price)  # the machine may have been away

    def note_hidden(self, work: Work) -> None:
        """`Drafter.note_hidden`."""
        assert self._reader is not None
        self._reader.note_hidden(work)

    def note_changes(self, changes: BlockChanges) -> None:
        """`Drafter.note_changes`."""
        if self._reader is not None:
            self._reader.note_changes(changes)

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """`Drafter.note_end`."""
        self._proposer.note_end(tokens, prompt)

    def _paying_or_tried(self, places: Ints, most: Ints) -> Ints:
        """Drafts of each sequence: as many as pay, or where none do, those of a trial if its time
        has come."""
        wanted, count = self._paying(places, most), len(places)
        if wanted.any():
            self._resting = 0
            return wanted
        self._credit = min(self._credit, AT_FIRST * _trial_share(count) * self._plain.least(count))
        due, self._resting = self._price > 0 and self._credit >= self._price, count
        tried = np.argsort(self._tried[places], kind="stable")[: max(1, count // TRIED)]
        rows = count + TRIAL * float(self._found[places[tried]].sum())
        seconds = self._times_with_drafts.of(rows) + self._drafting.of(TRIAL)
        self._price = self._price_of(float(seconds), count)
        if due:
            wanted[tried] = np.minimum(TRIAL, most[tried])
            self._tried[places[tried]], self._tries = self._step, True
        return wanted

    def _price_of(self, seconds: float, sequences: int) -> float:
        """What a trial costs that makes a step take so many seconds."""
        without = self._plain.least(sequences)
        return max(seconds - without, LEAST_PRICE * without)

    def _paying(self, places: Ints, most: Ints) -> Ints:
        """As many drafts of each sequence as make the most tokens a second."""
        position = np.arange(1, int(most.max()) + 1)
        found = np.broadcast_to(self._found[places, None], (len(places), len(position)))
        # A sequence's own p is a guess from few drafts: the largest of many is mostly too large.
        chance = (self._chance[places, None] + self._chance_of_all.mean) / 2
        first = (self._first[places, None] + self._first_of_all.mean) / 2
        gains = found * first * chance ** (position - 1.0)
        gains = np.where(position <= most[:, None], gains, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")  # of a sequence the first draft comes first
        chain = np.maximum.accumulate(order % len(position) + 1)
        count = self._best(len(places), gains[order], found.ravel()[order], chain)
        wanted = np.bincount(order[:count] // len(position), minlength=len(places))
        return np.minimum(wanted, most)

    def _best(self, sequences: int, gains: Floats, rows: Floats, chain: Ints) -> int:
        """How many drafts to take.

        Args:
            sequences: Rows of the step without drafts.
            gains: Tokens that each draft adds on average, descending.
            rows: Rows that it adds on average.
            chain: The longest chain with it.
        """
        seconds = self._times_with_drafts.of(sequences + np.cumsum(rows)) + self._drafting.of(chain)
        without = sequences / self._plain.least(sequences)
        speeds = (sequences + np.cumsum(gains)) / seconds
        best = int(speeds.argmax())
        return best + 1 if speeds[best] > MARGIN * without else 0

    @property
    def _times_with_drafts(self) -> StepTime:
        """What steps with drafts take; before any ran, what those without do."""
        return self._verifying if self._verifying.learned else self._plain


def _trial_share(sequences: int) -> float:
    """What share of the time that trials may take in a small batch they may take in one of so many
    sequences: the more there are, the less likely drafts pay."""
    return min(1.0, (TRIED / sequences) ** 0.5)


def _within(drafts: Ints, room: int) -> Ints:
    """Drafts of each sequence, the first ones, as long as there is room for them."""
    before = np.cumsum(drafts) - drafts
    return np.clip(room - before, 0, drafts)
