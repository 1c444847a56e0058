"""What a report tells of a budget: what was asked, chosen, predicted and measured.

`choice_rows` is a choice in a few lines, for a terminal and for a report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from formats.documents import Strict
from formats.files import replace_file
from inference.accuracy import Accuracy
from ptq.recipe.budget import BudgetSpec
from ptq.search.choice import Frontier
from ptq.search.costs import Cost, Costs, GroupCosts
from ptq.text import percent, size_text

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


HEAD = ("chosen", "groups", "weights", "bytes", "predicted KL")


def choice_rows(record: BudgetRecord) -> list[tuple[str, ...]]:
    """Head and rows: what each scheme was chosen for, and the whole, predicted and measured.

    Predictions are those from before the choice was measured.
    """
    costs, trial, factor = record.costs, record.trial, record.expected_factor
    rows: list[tuple[str, ...]] = [HEAD]
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
