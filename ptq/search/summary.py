"""A choice in a few lines, for a terminal and for a report."""

from __future__ import annotations

from ptq.search.costs import Cost, GroupCosts
from ptq.search.record import BudgetRecord, shares
from ptq.text import percent, size_text

HEAD = ("chosen", "groups", "weights", "bytes", "predicted KL")


def choice_rows(record: BudgetRecord) -> list[tuple[str, ...]]:
    """Head and rows: what each scheme was chosen for, and the whole, predicted and measured.

    Predictions are those from before the choice was measured.
    """
    costs, trial, factor = record.costs, record.trial, record.expected_factor
    lost: dict[str, float] = {}
    for group, name in zip(costs.groups, trial.schemes, strict=True):
        lost[name] = lost.get(name, 0.0) + cost_of(group, name).kl
    rows: list[tuple[str, ...]] = [HEAD]
    whole = sum(group.elements for group in costs.groups)
    for name, groups, elements, nbytes in shares(costs, trial.schemes):
        share, kl = percent(elements / whole, 1), f"{factor * lost[name]:.5f}"
        rows.append((name, str(groups), share, size_text(nbytes), kl))
    total = f"{trial.foretold:.5f}"
    rows.append(("with what stays as it is", "", "", size_text(trial.nbytes), total))
    rows.append((f"measured KL, for {record.budget.text}", "", "", "", f"{trial.kl:.5f}"))
    return rows


def cost_of(group: GroupCosts, scheme: str) -> Cost:
    """What a group's candidate costs."""
    return next(cost for cost in group.candidates if cost.scheme == scheme)
