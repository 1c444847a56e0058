"""The best choices of one candidate for each group, and the ordinary recipe that says one.

Dynamic programming, for every number of bytes: costs of different groups add up, and so do bytes.
Group by group, all sums of the front so far with the group's options are made, and those kept that
no other beats in both. That is exact as long as a front has no more than `CELLS` points; a longer
one is thinned to the cheapest point in each of so many equal cells of bytes. Bytes and costs of the
points that are kept stay exact.

Choices that lie above the lower convex hull are found too, which a Lagrange multiplier would miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.checkpoint.targets import is_ignored, layer_targets
from formats.families.names import HEAD
from ptq.recipe.schema import LayersSpec, Recipe
from ptq.search.costs import FLOAT, Costs

CELLS = 1 << 15


@dataclass(frozen=True)
class Point:
    """A choice for all groups: the index of each group's option, and what all of them cost."""

    choice: tuple[int, ...]
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Frontier:
    """Choices that no other one beats in both bytes and cost.

    Attributes:
        nbytes: Of each point, rising: int64 [points].
        kl: Of each point, falling: fp64 [points].
        steps: For each group, of each point of the front with it: the point before, and the
            group's option.
    """

    nbytes: NDArray[np.int64]
    kl: NDArray[np.float64]
    steps: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    def __len__(self) -> int:
        """Number of points."""
        return len(self.nbytes)

    def point(self, index: int) -> Point:
        """One of the points, with its choice."""
        choice, at = [], int(range(len(self))[index])
        nbytes, kl = int(self.nbytes[at]), float(self.kl[at])
        for before, option in reversed(self.steps):
            choice.append(int(option[at]))
            at = int(before[at])
        return Point(tuple(reversed(choice)), nbytes, kl)

    def smallest(self, kl: float) -> Point | None:
        """The fewest bytes that cost at most so much; None where all cost more."""
        index = int(np.searchsorted(-self.kl, -kl, side="left"))
        return self.point(index) if index < len(self) else None

    def best(self, nbytes: int) -> Point | None:
        """The least cost of at most so many bytes; None where all take more."""
        index = int(np.searchsorted(self.nbytes, nbytes, side="right")) - 1
        return self.point(index) if index >= 0 else None


def frontier(groups: Sequence[Sequence[tuple[int, float]]], cells: int = CELLS) -> Frontier:
    """All choices of one option for each group that no other beats in both bytes and cost.

    Args:
        groups: Options of each: the bytes that its layers then take, and the nats a token that the
            model is then predicted to lose. No group is empty.
        cells: Points from which on a front is thinned.
    """
    nbytes, kl = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for options in groups:
        own_bytes = np.array([taken for taken, _ in options], np.int64)
        own_kl = np.array([lost for _, lost in options])
        all_bytes = (nbytes[:, None] + own_bytes).ravel()
        all_kl = (kl[:, None] + own_kl).ravel()
        kept = _thinned(all_bytes, _unbeaten(all_bytes, all_kl), cells)
        nbytes, kl = all_bytes[kept], all_kl[kept]
        steps.append(divmod(kept, len(options)))
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


def chosen_recipe(recipe: Recipe, costs: Costs, schemes: Sequence[str]) -> Recipe:
    """A recipe without a budget that gives each group its scheme; `ptq run` repeats it.

    The recipe's own scheme is that of most weights; `layers` names the others. Where the budget
    limits what is measured, the recipe's thresholds do so too.
    """
    layers: dict[str, list[str]] = {}
    weights: dict[str, int] = {}
    head = FLOAT
    for group, name in zip(costs.groups, schemes, strict=True):
        if group.label == costs.head:
            head = name
            continue
        layers.setdefault(name, []).extend(group.layers)
        weights[name] = weights.get(name, 0) + group.elements
    most = max(weights, key=lambda name: weights[name])
    patterns = dict(zip(layers, layer_targets(list(layers.values())), strict=True))
    entries = [
        LayersSpec(match=tuple(patterns[name]), scheme=costs.schemes[name])
        for name in costs.schemes
        if name in layers and name != most
    ]
    if head != FLOAT:
        entries.append(LayersSpec(match=(HEAD,), scheme=costs.schemes[head]))
    others = tuple(entry for entry in recipe.ignore if not is_ignored(HEAD, [entry]))
    budget, report = recipe.budget, recipe.report
    assert budget is not None
    if budget.of_accuracy:
        thresholds = report.thresholds.model_copy(update=dict([budget.limit]))
        report = report.model_copy(update={"thresholds": thresholds})
    return Recipe.model_validate(
        dict(recipe)
        | {
            "budget": None,
            "scheme": recipe.scheme.model_copy(update=dict(costs.schemes[most])),
            "layers": tuple(entries),
            "ignore": (HEAD, *others) if head == FLOAT else others,
            "report": report,
        }
    )
