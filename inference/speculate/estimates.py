"""How long steps take and what share of drafts is accepted, estimated from the last ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from inference.scheduling.batch import Ints

Floats = NDArray[np.floating]

FORGOTTEN = 512  # steps of other sizes, after which what one of a size takes is forgotten
FADING = 0.9  # weight of the past in what a step of a size takes
OUTLIER = 5  # times what a step was expected to take: it compiled, or the machine was away
SIZES = np.array([*range(1, 9), *(n << i for i in range(2, 20) for n in (3, 4))])  # of steps
GROWTH = 0.25  # by which a step is taken to be slower that has twice the rows of all that ran
PRIOR = 0.6  # a share before anything is known
PRIOR_WEIGHT = 4  # as many as that counts for
OF_ALL = 0.95  # weight of the past in a share, at the most, for each of which it is told


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

    def note(self, came: int, count: int) -> None:
        """Learn that `came` of `count` were accepted (or found)."""
        self._weight = min(self._weight, 1 / (1 - OF_ALL)) + count
        self.mean += (came - count * self.mean) / self._weight
