"""How many drafts a step has: as many as bring the most tokens a second.

A step of R rows takes about a + b R seconds, with an a and b of its own where it has drafts (a GPU
is waited for then), and asking for drafts c + d m where the longest chain has m; all of them are
learned from the steps themselves. Drafts of a sequence are found with
probability f, and each comes with probability p where those before it came: the i-th adds f p^i
tokens to a step on average, and f rows. The drafts of all sequences are taken in the order of these
gains as long as they make

    (tokens of the step) / (seconds of the step)

larger: none, where they do not pay, as in a large batch. A sequence for which none pay rests, ever
longer, and gets a few then, so that it is noticed when its text becomes one that can be guessed;
rests end together, so that few steps have such drafts. One step of `PLAIN` has none in any case, so
that it stays known what such a step takes. While d > a + b not even drafts that always
come would pay: two steps of `SELDOM` have any then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.work import Work
from inference.speculate.proposer import HiddenStateProposer, Proposer

Floats = NDArray[np.floating]

MOST_DEPTH = 16  # drafts of a sequence in a step
PAUSES = 8, 128  # steps for which a sequence rests: first, and at most
SELDOM = 512  # steps
PLAIN = 64  # one step of so many has no drafts, so that it is known what such a step takes
PROBED = 2  # drafts of a sequence for which none pay
MEMORY = 0.8  # weight of the past in p, for each draft that was looked at, and in f
PRIOR = 0.6  # f and p before anything is known
RAREST = 0.02  # least f that is believed
OF_ALL = 0.98  # weight of the past in what a new sequence begins with
FADING = 0.98  # weight of the past in what a step takes
SLOPE = 0.1  # share of a one-row step that a further row is first taken to cost
OUTLIER = 5  # times what a step was expected to take: it compiled, or the machine was away


class StepTime:
    """Seconds of a step of so many rows, a + b R: least squares over past steps, which fade.

    Args:
        first: a and b before anything is known.

    Attributes:
        line: a and b, neither below zero.
    """

    def __init__(self, first: tuple[float, float]) -> None:
        self._n = self._r = self._rr = self._s = self._rs = 0.0
        self._first: tuple[int, float] | None = None  # rows and seconds, not believed yet
        self.line = first

    @property
    def learned(self) -> bool:
        """Whether `line` is what steps took."""
        return self._n > 0

    def note(self, rows: int, seconds: float) -> None:
        """Learn from a step; the first one is believed when a second has taken about as long."""
        if not self._n:
            first, self._first = self._first, (rows, seconds)
            if first is None or first[1] > OUTLIER * seconds:
                return
            self._learn(*first)
        if seconds <= OUTLIER * self.of(rows):
            self._learn(rows, seconds)

    def _learn(self, rows: int, seconds: float) -> None:
        if self._n:
            seconds = min(seconds, 2 * self.of(rows))  # one slow step says little of the next
        self._n, self._r, self._rr = (FADING * x for x in (self._n, self._r, self._rr))
        self._s, self._rs = FADING * self._s, FADING * self._rs
        self._n, self._r, self._rr = self._n + 1, self._r + rows, self._rr + rows * rows
        self._s, self._rs = self._s + seconds, self._rs + rows * seconds
        self.line = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        rows, seconds = self._r / self._n, self._s / self._n
        spread = self._rr / self._n - rows * rows
        first = seconds * SLOPE / (1 + SLOPE * rows)  # as if one more step had told so
        together = self._rs / self._n - rows * seconds
        slope = (together + first * rows * 0.01) / (spread + rows * 0.01)
        slope = min(max(slope, 0.0), seconds / rows)
        return seconds - slope * rows, slope

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        a, b = self.line
        return a + b * rows


class Speculation:
    """Drafts for the scheduler; see `inference.scheduling.drafter.Drafter`.

    Args:
        proposer: Makes them.
        places: Most sequences that run at once.
        depth: Drafts of each sequence in every step; None: as many as pay.

    Attributes:
        proposed: How many drafts were computed, by their position in the chain.
        accepted: How many of them came.
        steps: Times that a sequence had drafts.
        reads: Hidden states of each step that the proposer is told, if any.
    """

    def __init__(self, proposer: Proposer, places: int, depth: int | None = None) -> None:
        self._proposer, self._depth = proposer, depth
        self._reader = proposer if isinstance(proposer, HiddenStateProposer) else None
        self.reads = None if self._reader is None else self._reader.reads
        self._most = MOST_DEPTH if depth is None else depth
        self._found, self._chance = np.full(places + 1, PRIOR), np.full(places + 1, PRIOR)
        self._found_by_all = self._chance_of_all = PRIOR
        self._serial = np.full(places + 1, -1, np.int64)
        self._awake = np.zeros(places + 1, np.int64)  # the step from which on one is asked again
        self._rests = np.zeros(places + 1, np.bool_)
        self._pause = np.full(places + 1, PAUSES[0])
        self._planned = 0  # steps
        self._drafted = np.full(places + 1, -1, np.int64)  # the last of them that had drafts
        self._plain, self._drafting = StepTime((1.0, SLOPE)), StepTime((0.0, 0.0))
        self._verifying = StepTime((0.0, 0.0))  # steps in which drafts were asked for
        self._asked, self._spent = False, 0.0  # in this step; seconds of drafting
        self.proposed, self.accepted = (np.zeros(self._most, np.int64) for _ in range(2))
        self.steps = 0

    def wants(self, batch: RunningBatch, places: Ints) -> bool:
        """`Drafter.wants`."""
        step = self._planned + 1
        if self._depth is not None:
            return True
        if self._goes_without(step):
            return False
        new = self._serial[places] != batch.serial[places]
        return bool((new | (self._awake[places] <= step)).any())

    def _goes_without(self, step: int) -> bool:
        """Whether a step has no drafts, whoever runs."""
        if self._too_slow:
            return step % SELDOM >= 2
        return not self._plain.learned or step % PLAIN == 0

    @property
    def _too_slow(self) -> bool:
        """Whether a draft takes longer to make than a token to compute."""
        return self._drafting.line[1] > self._steps[0].of(1)

    @property
    def _steps(self) -> tuple[StepTime, StepTime]:
        """Times of steps without drafts and with; those of the former where there were none."""
        return self._plain, self._verifying if self._verifying.learned else self._plain

    def plan(self, batch: RunningBatch, places: Ints, most: Ints, room: int) -> Ints:
        """`Drafter.plan`."""
        most, self._planned = np.minimum(most, self._most), self._planned + 1
        if self._depth is None and self._goes_without(self._planned):
            return np.zeros_like(most)
        if self._depth is None and self._too_slow:
            return np.minimum(most, PROBED if PROBED * len(most) <= room else 0)
        new = self._serial[places] != batch.serial[places]
        fresh = places[new]
        self._found[fresh], self._chance[fresh] = self._found_by_all, self._chance_of_all
        self._awake[fresh], self._rests[fresh], self._pause[fresh] = 0, False, PAUSES[0]
        self._serial[fresh] = batch.serial[fresh]
        wanted = most
        if self._depth is None:
            wanted = np.zeros_like(most)
            asked = self._awake[places] <= self._planned
            if not asked.any():
                return wanted
            wanted[asked] = self._paying(places[asked], most[asked], len(places))
        fits = np.cumsum(wanted) - wanted < room
        return np.where(fits, np.minimum(wanted, room - (np.cumsum(wanted) - wanted)), 0)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """`Drafter.propose`."""
        start, self._asked = time.perf_counter(), True
        counts = self._proposer.propose(batch, places, most)
        self._spent = time.perf_counter() - start
        if (self._drafted[places] == self._planned - 1).all():  # else it had to catch up
            self._drafting.note(int(most.max()), self._spent)
        self._drafted[places] = self._planned
        found = np.maximum(MEMORY * self._found[places] + (1 - MEMORY) * (counts > 0), RAREST)
        self._found[places] = found
        self._found_by_all = _mixed(self._found_by_all, float(np.mean(counts > 0)))
        return counts

    def note_accepted(self, batch: RunningBatch, work: Work, which: Ints, accepted: Ints) -> None:
        """`Drafter.note_accepted`."""
        drafts, places = work.drafts[which], work.places[which]
        self.steps += len(which)
        position = np.arange(self._most)
        self.proposed += np.count_nonzero(drafts[:, None] > position, axis=0)
        self.accepted += np.count_nonzero(accepted[:, None] > position, axis=0)
        looked_at = np.minimum(accepted + 1, drafts)  # behind a wrong one nothing is known
        past = MEMORY**looked_at
        self._chance[places] = past * self._chance[places] + (1 - past) * accepted / looked_at
        right = places[accepted > 0]
        self._pause[right], self._awake[right] = PAUSES[0], 0
        share = float(accepted.sum() / max(int(looked_at.sum()), 1))
        self._chance_of_all = _mixed(self._chance_of_all, share)

    def note_time(self, work: Work, seconds: float) -> None:
        """`Drafter.note_time`."""
        spent, asked, self._spent, self._asked = self._spent, self._asked, 0.0, False
        if work.prompt_tokens == 0:
            times = self._verifying if asked else self._plain
            times.note(work.tokens, max(seconds - spent, 1e-9))

    def note_hidden(self, work: Work, hidden: Tensor) -> None:
        """`Drafter.note_hidden`."""
        assert self._reader is not None
        self._reader.note_hidden(work, hidden)

    def note_changes(self, changes: BlockChanges) -> None:
        """`Drafter.note_changes`."""
        if self._reader is not None:
            self._reader.note_changes(changes)

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """`Drafter.note_end`."""
        self._proposer.note_end(tokens, prompt)

    def _paying(self, places: Ints, most: Ints, rows: int) -> Ints:
        """As many drafts of each sequence as make the most tokens a second of a step of `rows`."""
        position = np.arange(1, int(most.max()) + 1)
        found = np.broadcast_to(self._found[places, None], (len(places), len(position)))
        gains = found * self._chance[places, None] ** position.astype(np.float64)
        gains = np.where(position <= most[:, None], gains, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")  # of a sequence the first draft comes first
        chain = np.maximum.accumulate(order % len(position) + 1)
        count = self._best(rows, gains[order], found.ravel()[order], chain)
        wanted = np.bincount(order[:count] // len(position), minlength=len(places))
        return self._rested(places, np.minimum(wanted, most), most)

    def _best(self, sequences: int, gains: Floats, rows: Floats, chain: Ints) -> int:
        """How many drafts to take.

        Args:
            sequences: Rows of the step without drafts.
            gains: Tokens that each draft adds on average, descending.
            rows: Rows that it adds on average.
            chain: The longest chain with it.
        """
        plain, verifying = self._steps
        (a, b), (c, d) = verifying.line, self._drafting.line
        seconds = a + b * (sequences + np.cumsum(rows)) + c + d * chain
        without = sequences / plain.of(sequences)
        speeds = (sequences + np.cumsum(gains)) / seconds
        best = int(speeds.argmax())
        return best + 1 if speeds[best] > without else 0

    def _rested(self, places: Ints, wanted: Ints, most: Ints) -> Ints:
        """Let sequences rest for which no drafts pay; those that come from a rest get a few."""
        idle = places[wanted == 0]
        again = self._rests[idle]
        self._rests[places], self._rests[idle] = False, True
        pause = self._pause[idle]
        self._awake[idle] = (self._planned // pause + 1) * pause  # with others' rests
        self._pause[idle[again]] = np.minimum(2 * self._pause[idle[again]], PAUSES[1])
        wanted[wanted == 0] = np.where(again, np.minimum(PROBED, most[wanted == 0]), 0)
        return wanted


def _mixed(past: float, now: float) -> float:
    return OF_ALL * past + (1 - OF_ALL) * now
