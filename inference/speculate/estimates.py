"""How long steps take, what share of drafts is accepted, and when drafts are tried.

Times and shares are estimated from the last steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from inference.scheduling.batch import Ints, RunningBatch

Floats = NDArray[np.floating]

FORGOTTEN = 512  # steps of other sizes, after which what one of a size takes is forgotten
FADING = 0.9  # weight of the past in what a step of a size takes
OUTLIER = 5  # times what a step was expected to take: it compiled, or the machine was away
SIZES = np.array([*range(1, 9), *(n << i for i in range(2, 20) for n in (3, 4))])  # of steps
GROWTH = 0.25  # by which a step is taken to be slower that has twice the rows of all that ran
PRIOR = 0.6  # a share before anything is known
PRIOR_WEIGHT = 4  # as many as that counts for
OF_ALL = 0.95  # weight of the past in a share, at the most, for each case that is noted
MEMORY = 0.85  # weight of the past in p, for each draft that was verified
MEMORY_OF_FOUND = 0.5  # weight of the past in f: where some are found, more follow
RAREST = 0.02  # least f that is believed


class StepTime:
    """Seconds of a step by its rows: means of steps of a size, and lines between the sizes.

    A size is up to 8 rows as they are, and then the next of 12, 16, 24, 32, 48, ... Of sizes that
    never ran that is believed which was told at the start, times what those that ran took more.

    Args:
        first: Seconds of any step before anything is known.
    """

    def __init__(self, first: float = 0.0) -> None:
        self._known: dict[int, float] = {}  # seconds by rows
        self._growth = GROWTH
        self._told: dict[int, float] = {}  # the same, as it was told at the start
        self._noted: dict[int, int] = {}  # when last
        self._doubted: dict[int, float] = {}  # seen once
        self._count = 0
        self._line: tuple[Floats, Floats] | None = np.ones(1), np.full(1, first)

    @property
    def learned(self) -> bool:
        """Whether any size is known."""
        return bool(self._known)

    def tell(self, seconds: Mapping[int, float]) -> None:
        """Learn what steps take by their rows, but for a factor; steps of fewer are padded."""
        rows = sorted(seconds)
        sizes = [n for n in SIZES.tolist() if rows and n <= rows[-1]]
        self._told = {n: seconds[rows[bisect_left(rows, n)]] for n in sizes}
        if len(sizes) > 1:
            self._line, most = None, sizes[-1]
            half = max(n for n in sizes if n <= most / 2)
            grown = 1 - self._told[half] / self._told[most]
            self._growth = max(GROWTH, grown / (1 - half / most))

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
        self._noted[size], self._line = self._count, None

    def least(self, rows: int) -> float:
        """Seconds of a step of so many rows, if one larger than all that ran takes no longer."""
        return float(np.interp(_size(rows), *self._lines()))

    def of(self, rows: Floats | Ints | float) -> Floats:
        """Seconds of steps of so many rows."""
        sizes = SIZES[np.searchsorted(SIZES, rows)]
        known, seconds = self._lines()
        more = np.maximum(sizes / known[-1] - 1, 0)
        return np.interp(sizes, known, seconds) * (1 + self._growth * more)

    def _lines(self) -> tuple[Floats, Floats]:
        """Sizes of which is known what they take, and that; never less than a smaller one."""
        if self._line is None:
            kept = {
                n: s for n, s in self._known.items() if self._count < self._noted[n] + FORGOTTEN
            }
            self._known = kept
            both = [kept[n] / self._told[n] for n in kept if n in self._told]
            factor = float(np.mean(both)) if both else 1.0
            kept = {n: s * factor for n, s in self._told.items()} | kept
            sizes = sorted(kept)
            seconds = np.maximum.accumulate([kept[n] for n in sizes])
            self._line = np.array(sizes, np.float64), seconds
        return self._line


def _size(rows: int) -> int:
    """The size whose steps are taken for alike."""
    return int(SIZES[np.searchsorted(SIZES, rows)])


class Share:
    """A share such as that of accepted drafts, from the last ones: at first all count alike, and
    `PRIOR` with them."""

    def __init__(self) -> None:
        self.mean, self._weight = PRIOR, float(PRIOR_WEIGHT)

    def note(self, cases: int, count: int) -> None:
        """Learn that `cases` of `count` were accepted (or found)."""
        self._weight = min(self._weight, 1 / (1 - OF_ALL)) + count
        self.mean += (cases - count * self.mean) / self._weight


class Rates:
    """Probabilities f, q and p of drafts (`inference.speculate.decoder`), of each sequence and of
    all.

    Args:
        places: Most sequences that run at once.
    """

    def __init__(self, places: int) -> None:
        self._own = np.zeros((3, places + 1))  # f, q, p by slot
        self._all = Share(), Share(), Share()
        self._serial = np.full(places + 1, -1, np.int64)

    def enter(self, batch: RunningBatch, places: Ints) -> None:
        """Begin with the rates of all for sequences that are new."""
        fresh = places[self._serial[places] != batch.serial[places]]
        self._own[:, fresh] = [[share.mean] for share in self._all]
        self._serial[fresh] = batch.serial[fresh]

    def know(self, batch: RunningBatch, places: Ints) -> bool:
        """Whether none of these sequences is new."""
        return bool((self._serial[places] == batch.serial[places]).all())

    def gains(self, places: Ints, position: Ints) -> tuple[Floats, Floats]:
        """Tokens that drafts of each sequence add at positions 1, 2, ..., and rows: [S, depth]."""
        found, first, chance = self._own[:, places, None]
        # A sequence's own p is a guess from few drafts: the largest of many is mostly too large.
        first, chance = (first + self._all[1].mean) / 2, (chance + self._all[2].mean) / 2
        found = np.broadcast_to(found, (len(places), len(position)))
        return found * first * chance ** (position - 1.0), found

    def found(self, places: Ints) -> float:
        """For how many of these sequences drafts are found, on average."""
        return float(self._own[0, places].sum())

    def note_found(self, places: Ints, counts: Ints) -> None:
        """Learn how many drafts were found for each sequence."""
        found = self._own[0]
        new = MEMORY_OF_FOUND * found[places] + (1 - MEMORY_OF_FOUND) * (counts > 0)
        found[places] = np.maximum(new, RAREST)
        self._all[0].note(int(np.count_nonzero(counts)), len(counts))

    def note_accepted(self, places: Ints, drafts: Ints, accepted: Ints) -> None:
        """Learn how many drafts of each sequence were accepted."""
        _, first, chance = self._own
        begun = accepted > 0
        first[places] = MEMORY * first[places] + (1 - MEMORY) * begun
        self._all[1].note(int(np.count_nonzero(begun)), len(begun))
        verified = np.minimum(accepted, drafts - 1)  # after a wrong one nothing is known
        right, past = np.maximum(accepted - 1, 0), MEMORY**verified
        own = (1 - past) * right / np.maximum(verified, 1)
        chance[places] = past * chance[places] + own
        self._all[2].note(int(right.sum()), int(verified.sum()))


class Trials:
    """When a few sequences have drafts though these do not pay.

    Steps without drafts save `SHARE` of their time each for trials, and less in a large batch,
    where drafts hardly ever pay, until there is enough for the next one. Accepted drafts save, too:
    a trial that went well is followed by another. All are counted in times of a step without
    drafts.
    """

    SHARE: ClassVar = 0.01  # of the time, for trials
    SEQUENCES: ClassVar = 8  # one of so many has drafts in a trial
    DEPTH: ClassVar = 4  # drafts of it
    FIRST: ClassVar = 3.0  # that the first trials may take in any case
    LEAST: ClassVar = 0.15  # that a trial takes: planning one takes time, too

    def __init__(self) -> None:
        self._saved, self._price = self.FIRST, 0.0
        self._resting = 0  # as many sequences ran when drafts paid for none; 0: they pay
        self._count = 0

    def wanted(self, sequences: int) -> bool:
        """Whether drafts are to be planned: they pay, may pay among so many, or are tried."""
        others = abs(sequences - self._resting) * self.SEQUENCES > self._resting
        return others or self._saved >= self._price

    def stop(self) -> None:
        """Drafts pay."""
        self._resting = 0

    def next(self, sequences: int) -> Ints:
        """Indices of the sequences that the next trial is of."""
        return np.arange(self._count % min(sequences, self.SEQUENCES), sequences, self.SEQUENCES)

    def due(self, sequences: int, price: float) -> bool:
        """Whether that is now, where drafts pay for none.

        Args:
            sequences: How many run.
            price: What the trial is expected to take more than a step without drafts.
        """
        self._resting, self._price = sequences, max(price, self.LEAST)
        due = self._saved >= self._price
        self._count += due
        return due

    def save(self, sequences: int) -> None:
        """A step without drafts was run."""
        more = self._saved + self.SHARE * _part(sequences)
        self._saved = min(more, max(self._saved, self._price))

    def gain(self, sequences: int, accepted: int) -> None:
        """Drafts were accepted in a step of so many sequences; they pay for one trial more."""
        more = self._saved + _part(sequences) * accepted / sequences
        self._saved = min(more, max(self._saved, 2 * self._price))

    def take(self, price: float) -> None:
        """A trial was run, and took so much more; the machine may have been away meanwhile."""
        self._saved -= min(max(price, self.LEAST), OUTLIER * self._price)


def _part(sequences: int) -> float:
    """Part of what trials may take in a small batch that they may take in one of so many."""
    return min(1.0, (Trials.SEQUENCES / sequences) ** 0.5)
