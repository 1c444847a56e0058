"""How many drafts a step has: as many as bring the most tokens a second.

What a step of so many rows takes is learned from the steps themselves, apart for those without
drafts and with (a GPU is waited for then), and so is what it takes to draft a chain. Drafts of a
sequence are found with probability f, and each comes with probability p where those before it came:
the i-th adds f p^i tokens to a step on average, and f rows. The drafts of all sequences are taken
in the order of these gains as long as they make

    (tokens of the step) / (seconds of the step)

larger: none, where they do not pay, as in a large batch. Sequences then rest, ever longer, and when
they wake a few of them get a few, so that it is noticed when text becomes one that can be guessed.
Rests end together, so that few steps have such drafts. One step of `PLAIN` has no drafts in any
case, so that it stays known what such a step takes. While a draft takes longer to make than a step,
not even drafts that always come would pay: two steps of `SELDOM` have any then.
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
PLAIN = 64  # steps
PROBED = 2  # drafts of a sequence for which none pay
TRIED = 8  # sequences, one of which is tried in a step
MEMORY = 0.85  # weight of the past in p, for each draft that was looked at, and in f
PRIOR = 0.6  # f and p before anything is known
RAREST = 0.02  # least f that is believed
OF_ALL = 0.95  # likewise in what is known of all sequences
FADING = 0.9  # weight of the past in what a step of a size takes
MARGIN = 1.05  # tokens a second with drafts, of those without, from which on drafts are made
OUTLIER = 5  # times what a step was expected to take: it compiled, or the machine was away
SIZES = np.array([*range(1, 9), *(n << i for i in range(2, 20) for n in (3, 4))])  # of steps
GROWTH = 0.25  # share of its rows by which a step larger than all that ran is taken to be slower


class StepTime:
    """Seconds of a step by its rows: means of steps of a size, and lines between the sizes.

    A size is up to 8 rows as they are, and then the next of 12, 16, 24, 32, 48, ...

    Args:
        first: Seconds of any step before anything is known.
    """

    def __init__(self, first: float = 0.0) -> None:
        self._first = first
        self._known: dict[int, float] = {}  # seconds by rows
        self._noted: dict[int, int] = {}  # when last
        self._doubted: dict[int, float] = {}  # seen once
        self._count = 0
        self._rows, self._seconds = np.ones(1), np.full(1, first)

    @property
    def learned(self) -> bool:
        """Whether any size is known."""
        return bool(self._known)

    def note(self, rows: int, seconds: float) -> None:
        """Learn from a step; of a size that is new the first is believed with the second."""
        size, self._count = _size(rows), self._count + 1
        if size in self._known:
            known = self._known[size]
            if seconds > OUTLIER * known:
                return
            self._known[size] += (1 - FADING) * (min(seconds, 2 * known) - known)
        elif size in self._doubted:
            self._known[size] = min(seconds, self._doubted.pop(size))
        else:
            self._doubted[size] = seconds
            return
        self._noted[size] = self._count
        kept = {n: s for n, s in self._known.items() if self._count - self._noted[n] < SELDOM}
        self._known = kept
        sizes = sorted(kept)
        self._rows = np.array(sizes, np.float64)
        self._seconds = np.maximum.accumulate([kept[n] for n in sizes])

    def least(self, rows: int) -> float:
        """Seconds of a step of so many rows, if one larger than all that ran takes no longer."""
        return float(np.interp(_size(rows), self._rows, self._seconds))

    def of(self, rows: Floats | Ints | float) -> Floats:
        """Seconds of steps of so many rows."""
        sizes = SIZES[np.searchsorted(SIZES, rows)]
        more = np.maximum(sizes / self._rows[-1] - 1, 0)
        return np.interp(sizes, self._rows, self._seconds) * (1 + GROWTH * more)


def _size(rows: int) -> int:
    """The size whose steps are taken for alike."""
    return int(SIZES[np.searchsorted(SIZES, rows)])


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
        self._pause = np.full(places + 1, PAUSES[0])
        self._planned = 0  # steps
        self._drafted = np.full(places + 1, -1, np.int64)  # the last of them that had drafts
        self._plain, self._drafting = StepTime(1.0), StepTime()
        self._verifying = StepTime()  # steps in which drafts were asked for
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
        return step % PLAIN == 0 or not self._plain.learned

    @property
    def _too_slow(self) -> bool:
        """Whether a draft takes longer to make than a token to compute."""
        return self._drafting.least(1) > self._plain.least(1)

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
        self._awake[fresh], self._pause[fresh] = 0, PAUSES[0]
        self._serial[fresh] = batch.serial[fresh]
        wanted = most
        if self._depth is None:
            wanted = np.zeros_like(most)
            asked = self._awake[places] <= self._planned
            if not most[asked].any():
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
        past = OF_ALL ** len(counts)
        self._found_by_all = past * self._found_by_all + (1 - past) * float(np.mean(counts > 0))
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
        self._awake[places[accepted > 0]] = 0
        count = int(looked_at.sum())
        past, share = OF_ALL**count, float(accepted.sum() / max(count, 1))
        self._chance_of_all = past * self._chance_of_all + (1 - past) * share

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
        # A sequence's own p is a guess from few drafts: the largest of many is mostly too large.
        chance = (self._chance[places, None] + self._chance_of_all) / 2
        gains = found * chance ** position.astype(np.float64)
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
        verifying = self._verifying if self._verifying.learned else self._plain
        seconds = verifying.of(sequences + np.cumsum(rows)) + self._drafting.of(chain)
        without = sequences / self._plain.least(sequences)
        speeds = (sequences + np.cumsum(gains)) / seconds
        best = int(speeds.argmax())
        return best + 1 if speeds[best] > MARGIN * without else 0

    def _rested(self, places: Ints, wanted: Ints, most: Ints) -> Ints:
        """Let sequences rest if drafts pay for none of them; some that have rested get a few."""
        if wanted.any():  # who has none now may have some next time
            self._awake[places], self._pause[places] = 0, PAUSES[0]
            return wanted
        again, pause = self._awake[places] > 0, self._pause[places]
        self._awake[places] = (self._planned // pause + 1) * pause  # a multiple: all together
        self._pause[places[again]] = np.minimum(2 * pause[again], PAUSES[1])
        tried = np.flatnonzero(again)[: max(1, len(places) // TRIED)]
        wanted[tried] = np.minimum(PROBED, most[tried])
        return wanted
