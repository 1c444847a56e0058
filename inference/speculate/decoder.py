"""Speculative decoding: how many drafts a step has, as many as bring the most tokens a second.

A table of step times by rows is learned from the steps themselves, separately for those without
drafts and with (a GPU is waited for then), and so is what drafting a chain takes. For sizes that
have not run yet a GPU gives the times of captured steps, measured at warm-up. Drafts of a sequence
are found with probability f, the first is accepted with probability q, and each that follows with
probability p where those before it were: the i-th adds f q p^(i - 1) tokens to a step on average,
and f rows. The drafts of all sequences are taken in the order of these gains as long as they make

    (tokens of the step) / (seconds of the step)

larger: none, where they do not pay, as in a large batch. Then a few sequences get a few now and
then (`Trials`), so that text that can be guessed is noticed. One step of `PLAIN` has no drafts in
any case, so that the time of such a step stays known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from inference.proposers import Proposer
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.work import Work, fitting
from inference.speculate.counts import Tally
from inference.speculate.estimates import Floats, Rates, StepTime, Trials

MOST_DEPTH = 16  # drafts of a sequence in a step
PLAIN = 64  # steps
MARGIN = 1.08  # tokens a second with drafts, of those without, from which on drafts are made


@dataclass
class _Step:
    """The step that is planned or running: whether drafts were considered, whether they are a
    trial, and the seconds that drafting took; None where no drafts were asked for."""

    planned: bool = False
    trial: bool = False
    drafting: float | None = None


class SpeculativeDecoder:
    """What the scheduler asks for drafts.

    Args:
        places: Most sequences that run at once.
        depth: Drafts of each sequence in every step; None: as many as pay.

    Attributes:
        proposer: Makes them.
    """

    def __init__(self, proposer: Proposer, places: int, depth: int | None = None) -> None:
        self.proposer, self._depth = proposer, depth
        self._most = MOST_DEPTH if depth is None else depth
        self._tally, self._rates, self._trials = Tally(self._most), Rates(places), Trials()
        self._plain, self._drafting = StepTime(1.0), StepTime()
        self._verifying = StepTime()  # steps in which drafts were asked for
        self._steps, self._now = 0, _Step()
        self._drafted = np.full(places + 1, -1, np.int64)  # last step in which each had drafts

    def wants(self, sequences: int) -> bool:
        """Whether the next step may have drafts; it is planned with all tokens known then.

        Args:
            sequences: How many run.
        """
        if self._depth is not None:
            return True
        if self._steps % PLAIN == 0 or not self._plain.learned:
            return False
        return self._trials.wanted(sequences)

    def plan(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """How many drafts each sequence is to have in a step; blocks are taken for so many.

        It is called for every step that may have drafts, and where no sequence can, with none.

        Args:
            places: Those of which all tokens are known, and all but the last computed.
            most: Most drafts of each: what it may still come to have, less one.
            room: Most drafts of all.
        """
        most, self._now.planned = np.minimum(most, self._most), True
        if not most.any():
            return most
        self._rates.enter(batch, places)
        if self._depth is not None:
            return fitting(most, room)
        wanted, count = self._paying(places, most), len(places)
        if wanted.any():
            self._trials.stop()
            return fitting(wanted, room)
        tried = self._trials.next(count)
        rows = count + Trials.DEPTH * self._rates.found(places[tried])
        seconds = self._times_with_drafts.of(rows) + self._drafting.of(Trials.DEPTH)
        self._now.trial = self._trials.due(count, self._more(float(seconds), count))
        if self._now.trial:
            wanted[tried] = np.minimum(Trials.DEPTH, most[tried])
        return fitting(wanted, room)

    def plan_ahead(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """As `plan`, for the step after one that still runs; none where it would try drafts.

        Nothing is noted: the step may be planned again when that one has ended.
        """
        if not self._rates.know(batch, places):
            return np.zeros_like(most)
        most = np.minimum(most, self._most)
        return fitting(most if self._depth is not None else self._paying(places, most), room)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """Write drafts to `batch.ids`, after what is known; how many there are of each.

        Args:
            places: Who gets drafts.
            most: Most of each, at least one.
        """
        if self._depth is not None:
            return self.proposer.propose(batch, places, most)
        start = time.perf_counter()
        counts = self.proposer.propose(batch, places, most)
        self._now.drafting = time.perf_counter() - start
        if (self._drafted[places] == self._steps - 1).all():  # else it had to catch up
            self._drafting.note(int(most.max()), self._now.drafting)
        self._drafted[places] = self._steps
        self._rates.note_found(places, counts)
        return counts

    def note_accepted(self, batch: RunningBatch, work: Work, which: Ints, accepted: Ints) -> None:
        """Learn which drafts were accepted.

        Args:
            batch: The sequences; some may have ended since.
            which: Indices of its slices that had drafts and whose first new token was chosen.
            accepted: How many of each one's drafts were.
        """
        self._tally.note(work.drafts[which], accepted)
        if self._depth is None:
            self._rates.note_accepted(work.places[which], work.drafts[which], accepted)
            self._trials.gain(len(work), int(accepted.sum()))

    def learn_times(self, measure: Callable[[], Mapping[int, float]]) -> None:
        """Learn at the start what steps take whose attention reads nothing.

        Args:
            measure: Gives seconds by rows, a step of fewer being padded to the next of these; it
                takes a while, and is called only where they are used.
        """
        if self._depth is not None:
            return
        seconds = measure()
        for times in (self._plain, self._verifying):
            times.tell(seconds)

    def note_time(self, work: Work, seconds: float) -> None:
        """Learn how long a step took, drafting included; noted of every step, in their order."""
        now, self._now = self._now, _Step()
        if self._depth is not None:
            return
        self._steps += 1
        if work.prompt_tokens:
            return
        if now.drafting is not None:
            self._verifying.note(work.tokens, max(seconds - now.drafting, 1e-9))
        elif not now.planned:  # else a GPU may have been waited for
            self._plain.note(work.tokens, seconds)
            self._trials.save(len(work))
        if now.trial:
            spent = max(now.drafting or 0.0, self._drafting.least(Trials.DEPTH))  # to catch up, too
            spent += self._verifying.least(work.tokens)
            self._trials.take(self._more(spent, len(work)))

    @property
    def steps(self) -> int:
        """Times that a sequence had drafts."""
        return self._tally.steps

    @property
    def proposed(self) -> Ints:
        """How many drafts were verified, by their position in the chain: int64 [depth]."""
        return self._tally.counted()[0]

    @property
    def accepted(self) -> Ints:
        """How many of them were accepted, likewise."""
        return self._tally.counted()[1]

    def _paying(self, places: Ints, most: Ints) -> Ints:
        """As many drafts of each sequence as make the most tokens a second."""
        position = np.arange(1, int(most.max()) + 1)
        gains, found = self._rates.gains(places, position)
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

    def _more(self, seconds: float, sequences: int) -> float:
        """How much longer a step takes than one without drafts, in times of that."""
        return seconds / self._plain.least(sequences) - 1

    @property
    def _times_with_drafts(self) -> StepTime:
        """What steps with drafts take; before any ran, what those without do."""
        return self._verifying if self._verifying.learned else self._plain
