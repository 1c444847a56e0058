"""The best choices of one candidate for each group, the recipe that says one, and its record.

Dynamic programming, for every number of bytes: costs of different groups add up, and so do bytes.
Group by group, all sums of the front so far with the group's options are made, and those kept that
no other beats in both. That is exact as long as a front has no more than `CELLS` points; a longer
one is thinned to the cheapest point in each of so many equal cells of bytes. Bytes and costs of the
points that are kept stay exact.

Choices that lie above the lower convex hull are found too, which a Lagrange multiplier would miss.

A report has a record of a budget: what was asked, chosen, predicted and measured. `choice_rows` is
a choice in a few lines, for a terminal and for a report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from formats.checkpoint.targets import is_ignored, layer_targets
from formats.documents import Strict
from formats.families.block_layers import HEAD
from formats.files import replace_file
from inference.accuracy import Accuracy
from ptq.recipe.budget import BudgetSpec
from ptq.recipe.schema import LayersSpec, Recipe
from ptq.search.costs import FLOAT, Cost, Costs, GroupCosts
from ptq.text import percent, size_text

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


MEASURED_FILE = "measured.json"
CURVE = 400  # points of the frontier that are kept


class Trial(Strict):
    """One choice that was quantized and measured.

    Attributes:
        schemes: Of each group, by their short names.
        nbytes: Of the weight files.
        predicted: Nats, as the costs say, uncorrected.
        foretold: The same times what measured KL was known to exceed it by before this choice was
            measured.
        kl: Mean KL divergence on the evaluation split, in nats.
        perplexity_ratio: The same of perplexity.
        limit: In the budget's terms; None where it limits bytes.
        measured: The same as measured.
    """

    schemes: tuple[str, ...]
    nbytes: int
    predicted: float
    foretold: float
    kl: float
    perplexity_ratio: float
    limit: float | None
    measured: float

    @property
    def key(self) -> str:
        """By which `Measured` knows it."""
        return ",".join(self.schemes)

    @property
    def excess(self) -> float:
        """What was measured, of what was predicted."""
        return max(self.measured, 1e-9) / self.predicted if self.predicted > 0 else 1.0

    @property
    def holds(self) -> bool:
        """Whether it keeps the budget."""
        return self.limit is None or self.measured <= self.limit


def loss_of(budget: BudgetSpec, accuracy: Accuracy) -> float:
    """What was measured, on a scale that grows as KL does; the KL where bytes are limited."""
    if budget.limit[0] == "perplexity_ratio":
        return math.log(accuracy.perplexity_ratio)
    return accuracy.kl_mean


class Tried(Strict):
    """What was measured of a choice, and the KL in nats that was foretold before that."""

    accuracy: Accuracy
    foretold: float


class Measured(Strict):
    """Choices that were measured, whatever the budget was, so that none is measured again.

    Attributes:
        key: Of the costs and of the evaluation text.
        of: By the groups' schemes, joined with commas.
    """

    key: str
    of: dict[str, Tried]

    @classmethod
    def load(cls, folder: Path, key: str) -> Measured:
        """Those that lie beside the costs; none of another key."""
        path = folder / MEASURED_FILE
        try:
            known = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):  # not there, or of other code
            return cls(key=key, of={})
        return known if known.key == key else cls(key=key, of={})

    def add(self, folder: Path, schemes: Sequence[str], tried: Tried) -> None:
        """Keep one more."""
        self.of[",".join(schemes)] = tried
        replace_file(folder / MEASURED_FILE, (self.model_dump_json() + "\n").encode())

    def excess(self, costs: Costs, budget: BudgetSpec | None = None) -> float | None:
        """What measured loss is of the predicted one, of the last choice; None without any.

        It is the loss that the budget limits; the KL divergence without one.
        """
        for schemes, tried in reversed(self.of.items()):
            predicted = costs.predicted(schemes.split(","))
            if predicted:
                kl = tried.accuracy.kl_mean
                measured = kl if budget is None else loss_of(budget, tried.accuracy)
                return max(measured, 1e-9) / predicted
        return None


class Curve(Strict):
    """Bytes of the weight files, and the least predicted nats at them, uncorrected."""

    nbytes: tuple[int, ...]
    kl: tuple[float, ...]

    @classmethod
    def of(cls, found: Frontier, fixed_bytes: int) -> Curve:
        """A frontier, thinned."""
        step = max(1, -(-len(found) // CURVE))
        at = sorted({*range(0, len(found), step), len(found) - 1})
        return cls(
            nbytes=tuple(int(found.nbytes[i]) + fixed_bytes for i in at),
            kl=tuple(float(found.kl[i]) for i in at),
        )


class BudgetRecord(Strict):
    """Everything of a search.

    Attributes:
        trials: What was measured, in its order.
        chosen: Which of them it is.
    """

    budget: BudgetSpec
    costs: Costs
    curve: Curve
    trials: tuple[Trial, ...]
    chosen: int

    @property
    def trial(self) -> Trial:
        """The choice."""
        return self.trials[self.chosen]

    @property
    def expected_factor(self) -> float:
        """What measured KL was taken to exceed the predicted one by, before it was measured."""
        return self.trial.foretold / self.trial.predicted if self.trial.predicted else 1.0

    @property
    def factor(self) -> float:
        """What measured KL exceeds the predicted one by, in the choice."""
        return self.trial.kl / self.trial.predicted if self.trial.predicted else 1.0


def shares(costs: Costs, schemes: Sequence[str]) -> list[tuple[str, int, int, int, float]]:
    """Of each scheme that was chosen: its short name, groups, weights, bytes and nats."""
    rows: dict[str, tuple[int, int, int, float]] = {}
    for group, name in zip(costs.groups, schemes, strict=True):
        count, elements, nbytes, kl = rows.get(name, (0, 0, 0, 0.0))
        cost = cost_of(group, name)
        rows[name] = count + 1, elements + group.elements, nbytes + cost.nbytes, kl + cost.kl
    return [(name, *rows[name]) for name in costs.schemes if name in rows]


COLUMNS = ("chosen", "groups", "weights", "bytes", "predicted KL")


def choice_rows(record: BudgetRecord) -> list[tuple[str, ...]]:
    """Head and rows: what each scheme was chosen for, and the whole, predicted and measured.

    Predictions are those from before the choice was measured.
    """
    costs, trial, factor = record.costs, record.trial, record.expected_factor
    rows: list[tuple[str, ...]] = [COLUMNS]
    whole = sum(group.elements for group in costs.groups)
    for name, groups, elements, nbytes, kl in shares(costs, trial.schemes):
        share, lost = percent(elements / whole, 1), f"{factor * kl:.5f}"
        rows.append((name, str(groups), share, size_text(nbytes), lost))
    total = f"{trial.foretold:.5f}"
    rows.append(("with what stays as it is", "", "", size_text(trial.nbytes), total))
    rows.append((f"measured KL, for {record.budget.text}", "", "", "", f"{trial.kl:.5f}"))
    return rows


def cost_of(group: GroupCosts, scheme: str) -> Cost:
    """What a group's candidate costs."""
    return next(cost for cost in group.candidates if cost.scheme == scheme)
