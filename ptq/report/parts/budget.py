"""The report's section on a budget: the frontier, and what was chosen, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from ptq.report.page.figure import LIMIT, ORIGINAL, QUANTIZED, new_panel
from ptq.report.page.page import Cells, Plot, Section, Table
from ptq.search.costs import Cost, GroupCosts
from ptq.search.record import BudgetRecord, Trial, choice_rows, cost_of
from ptq.text import size_text

FOLDED = 40  # groups from which on their table is folded


def budget_section(record: BudgetRecord) -> Section:
    """What was asked, what was chosen from, and the outcome."""
    head, *rows = choice_rows(record)
    shown = "Bytes of the weight files against KL divergence: the frontier, uniform recipes, trials"
    groups = [_group_row(record, group, name) for group, name in _chosen(record)]
    return Section(
        f"The budget: {record.budget.text}",
        f"Layers that are multiplied as one share a scheme, of those that the target "
        f"{record.budget.target} runs fast. Each candidate was rounded by "
        f"{record.costs.rounding} and its cost taken from the model's Fisher information: what "
        "rounding weights and inputs costs in nats of KL divergence, to second order, on the "
        "calibration text. Costs add up, and dynamic programming finds the fewest bytes for every "
        "loss. What is measured on the evaluation text exceeds predictions by a factor that hardly "
        "depends on the choice (errors of several layers go together, and the text is another): "
        f"here {record.factor:.3f}, where {record.expected_factor:.3f} was expected. What is said "
        "to be predicted of a choice is what was expected before it was measured; the frontier and "
        "the groups' figures are multiplied with the factor that was found.",
        (Plot("frontier", shown, partial(_draw, record)),),
        (
            Table(head, rows, "What was chosen"),
            Table(TRIAL, list(_trial_rows(record)), "Choices that were measured"),
            Table(
                GROUP,
                groups,
                "Each group, and one step to its sides",
                len(groups) > FOLDED,
            ),
        ),
    )


TRIAL = ("trial", "bytes", "uncorrected", "predicted KL", "measured KL", "perplexity", "budget")
GROUP = ("group", "chosen", "bits", "KL", "one step smaller", "one step larger")


def _chosen(record: BudgetRecord) -> Iterator[tuple[GroupCosts, str]]:
    return zip(record.costs.groups, record.trial.schemes, strict=True)


def _trial_rows(record: BudgetRecord) -> Iterator[Cells]:
    for i, trial in enumerate(record.trials):
        yield (
            f"{i + 1}{', chosen' if i == record.chosen and len(record.trials) > 1 else ''}",
            size_text(trial.nbytes),
            f"{trial.predicted:.5f}",
            f"{trial.foretold:.5f}",
            f"{trial.kl:.5f}",
            f"x {trial.perplexity_ratio:.4f}",
            _kept(trial),
        )


def _kept(trial: Trial) -> str:
    if trial.limit is None:
        return ""
    return "holds" if trial.holds else "MISSED"


def _group_row(record: BudgetRecord, group: GroupCosts, name: str) -> Cells:
    """A group, its choice, and what the next candidates would change."""
    here = cost_of(group, name)
    by_size = sorted(group.candidates, key=lambda cost: cost.nbytes)
    at = by_size.index(here)
    return (
        group.label,
        name,
        f"{8 * here.nbytes / group.elements:.2f}",
        f"{record.factor * here.kl:.6f}",
        _step(record, here, by_size[at - 1]) if at > 0 else "",
        _step(record, here, by_size[at + 1]) if at + 1 < len(by_size) else "",
    )


def _step(record: BudgetRecord, here: Cost, other: Cost) -> str:
    """What another candidate would change, and the price of a byte."""
    kl, nbytes = record.factor * (other.kl - here.kl), other.nbytes - here.nbytes
    return f"{other.scheme}: {kl:+.6f} nats, {nbytes / 1e3:+,.1f} kB, {-1e9 * kl / nbytes:.1f} n/B"


def _draw(record: BudgetRecord) -> list[Axes]:
    """KL divergence against bytes: the frontier, one scheme for all, and what was measured."""
    axes, factor, curve = new_panel(4.2), record.factor, record.curve
    along, down = [x / 1e6 for x in curve.nbytes], [factor * y for y in curve.kl]
    label = "least predicted loss, corrected"
    axes.step(along, down, where="post", color=QUANTIZED, alpha=0.5, linewidth=2, label=label)
    for scheme in record.costs.schemes:
        if (whole := record.costs.uniform(scheme)) is not None:
            x, y = whole[0] / 1e6, factor * whole[1]
            axes.plot(x, y, "s", color=ORIGINAL, markerfacecolor="white")
            axes.annotate(scheme, (x, y), (6, 4), textcoords="offset points", fontsize=8)
    label = "one scheme for all, as predicted"
    axes.plot([], [], "s", color=ORIGINAL, markerfacecolor="white", label=label)
    for i, trial in enumerate(record.trials):
        if i != record.chosen:
            axes.plot(trial.nbytes / 1e6, trial.kl, "o", color=LIMIT, markersize=5)
    size, kl = record.trial.nbytes / 1e6, record.trial.kl
    axes.plot(size, kl, "*", color=LIMIT, markersize=12, label="chosen, as measured")
    _limit(axes, record)
    axes.set_yscale("log")
    axes.set_xlabel("weight files (MB)")
    axes.set_ylabel("KL divergence (nats)")
    axes.set_title("The least that every size loses")
    axes.legend(fontsize=8, loc="upper right")
    return [axes]


def _limit(axes: Axes, record: BudgetRecord) -> None:
    name, value = record.budget.limit
    if name == "kl":
        axes.axhline(value, color=LIMIT, linewidth=1, linestyle="--")
    if name == "bytes":
        axes.axvline(value / 1e6, color=LIMIT, linewidth=1, linestyle="--")
