"""From a choice of candidates to the ordinary recipe that says it."""

from __future__ import annotations

from collections.abc import Sequence

from formats.checkpoint.targets import is_ignored, layer_targets
from formats.families.names import HEAD
from formats.scheme import Scheme
from ptq.recipe.budget import BudgetSpec
from ptq.recipe.schema import LayersSpec, Recipe, ReportSpec
from ptq.search.costs import FLOAT, Costs


def chosen_recipe(recipe: Recipe, costs: Costs, schemes: Sequence[str]) -> Recipe:
    """A recipe without a budget that gives each group its scheme; `ptq run` repeats it.

    The recipe's own scheme is that of most weights; `layers` names the others. Where the budget
    limits what is measured, the recipe's thresholds do so too.

    Args:
        recipe: With the budget.
        costs: What was chosen from.
        schemes: Short name of each group's.
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
    assert recipe.budget is not None
    return Recipe.model_validate(
        dict(recipe)
        | {
            "budget": None,
            "scheme": Scheme(**dict(costs.schemes[most]), kv_cache=recipe.scheme.kv_cache),
            "layers": tuple(entries),
            "ignore": (HEAD, *others) if head == FLOAT else others,
            "report": _held_to(recipe.report, recipe.budget),
        }
    )


def _held_to(report: ReportSpec, budget: BudgetSpec) -> ReportSpec:
    """The report's thresholds with the budget's limit, where it is one of accuracy."""
    name, value = budget.limit
    if not budget.of_accuracy:
        return report
    thresholds = report.thresholds.model_copy(update={name: value})
    return report.model_copy(update={"thresholds": thresholds})
