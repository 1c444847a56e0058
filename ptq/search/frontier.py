"""The best choices of one option for each group, for every number of bytes: dynamic programming.

Costs of different groups add up, and so do bytes. Group by group, all sums of the front so far with
the group's options are made, and those kept that no other beats in both. That is exact as long as a
front has no more than `CELLS` points; a longer one is thinned to the cheapest point in each of so
many equal cells of bytes. Bytes and costs of the points that are kept stay exact.

Choices that lie above the lower convex hull are found too, which a Lagrange multiplier would miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CELLS = 1 << 15


@dataclass(frozen=True)
class Option:
    """What a group may get.

    Attributes:
        label: For a person; of its group's options, one has it.
        nbytes: That its layers then take.
        kl: Nats a token that the model is then predicted to lose by it.
    """

    label: str
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Point:
    """A choice for all groups: the index of each group's option, and what all of them cost."""

    choice: tuple[int, ...]
    nbytes: int
    kl: float


@dataclass(frozen=True)
class _Step:
    """A front after one more group: of each point, the point before and the group's option."""

    before: NDArray[np.int64]
    option: NDArray[np.int64]


@dataclass(frozen=True)
class Frontier:
    """Choices that no other one beats in both bytes and cost.

    Attributes:
        nbytes: Of each point, rising: int64 [points].
        kl: Of each point, falling: fp64 [points].
        steps: How the points were found.
    """

    nbytes: NDArray[np.int64]
    kl: NDArray[np.float64]
    steps: tuple[_Step, ...]

    def __len__(self) -> int:
        """Number of points."""
        return len(self.nbytes)

    def point(self, index: int) -> Point:
        """One of the points, with its choice."""
        choice, at = [], int(range(len(self))[index])
        nbytes, kl = int(self.nbytes[at]), float(self.kl[at])
        for step in reversed(self.steps):
            choice.append(int(step.option[at]))
            at = int(step.before[at])
        return Point(tuple(reversed(choice)), nbytes, kl)

    def smallest(self, kl: float) -> Point | None:
        """The fewest bytes that cost at most so much; None where all cost more."""
        index = int(np.searchsorted(-self.kl, -kl, side="left"))
        return self.point(index) if index < len(self) else None

    def best(self, nbytes: int) -> Point | None:
        """The least cost of at most so many bytes; None where all take more."""
        index = int(np.searchsorted(self.nbytes, nbytes, side="right")) - 1
        return self.point(index) if index >= 0 else None


def frontier(groups: Sequence[Sequence[Option]], cells: int = CELLS) -> Frontier:
    """All choices of one option for each group that no other beats in both bytes and cost.

    Args:
        groups: Options of each; no group is empty.
        cells: Points from which on a front is thinned.
    """
    nbytes, kl = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for options in groups:
        own_bytes = np.array([option.nbytes for option in options], np.int64)
        own_kl = np.array([option.kl for option in options])
        all_bytes = (nbytes[:, None] + own_bytes).ravel()
        all_kl = (kl[:, None] + own_kl).ravel()
        kept = _thinned(all_bytes, _unbeaten(all_bytes, all_kl), cells)
        nbytes, kl = all_bytes[kept], all_kl[kept]
        steps.append(_Step(kept // len(options), kept % len(options)))
    return Frontier(nbytes, kl, tuple(steps))


def _unbeaten(nbytes: NDArray[np.int64], kl: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the points that none beats, bytes rising; the first of equals."""
    order = np.lexsort((kl, nbytes))
    least = np.minimum.accumulate(kl[order])
    better = np.concatenate([[True], kl[order][1:] < least[:-1]])
    return order[better]


def _thinned(nbytes: NDArray[np.int64], kept: NDArray[np.int64], cells: int) -> NDArray[np.int64]:
    """The smallest point of a front and the cheapest, which is the last, of each cell of bytes."""
    if len(kept) <= cells:
        return kept
    first, last = int(nbytes[kept[0]]), int(nbytes[kept[-1]])
    cell = (nbytes[kept] - first) * cells // (last - first + 1)
    ends = np.concatenate([cell[1:] != cell[:-1], [True]])
    ends[0] = True
    return kept[ends]
