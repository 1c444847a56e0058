"""Candidates of a target, what a budget chooses of them, and what it refuses."""

from types import SimpleNamespace

import pytest

from formats.scheme import PRESETS
from ptq import cli
from ptq.recipe.budget import BudgetSpec, read_bytes
from ptq.search.choice import frontier
from ptq.search.costs import Cost, Costs, GroupCosts, candidates
from ptq.search.search import best, choices, usual_excess
from tests.refusals import refused, refused_recipe

SMALL = Cost(scheme="w4", nbytes=1000, weights=0.004, inputs=0.0)
LARGE = Cost(scheme="w8", nbytes=2000, weights=0.0001, inputs=0.0)


def costs_of(groups: int = 20) -> Costs:
    """Groups that cost more and more."""
    return Costs(
        key="k",
        rounding="gptq",
        schemes={"w4": PRESETS["w4"].of_layers, "w8": PRESETS["w8"].of_layers},
        fixed_bytes=500,
        groups=tuple(
            GroupCosts(
                label=f"g{i}",
                layers=(f"g{i}",),
                elements=2000,
                candidates=tuple(
                    cost.model_copy(update={"weights": cost.weights * (i + 1) / groups})
                    for cost in (SMALL, LARGE)
                ),
            )
            for i in range(groups)
        ),
    )


def searched(budget: BudgetSpec, factor: float, groups: int = 20) -> list:
    """The trials of a search where measured loss is a factor of the predicted one."""
    costs, trials = costs_of(groups), []
    usual = usual_excess(budget, costs.rounding)
    for point in choices(frontier(costs.options), budget, costs, trials, usual):
        kl = factor * point.kl
        limit = budget.kl
        trials.append(
            SimpleNamespace(
                nbytes=point.nbytes + costs.fixed_bytes,
                predicted=point.kl,
                measured=kl,
                excess=factor,
                limit=limit,
                holds=limit is None or kl <= limit,
            )
        )
    return trials


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.2, 1.6, 3.0])
def test_at_most_two_trials_keep_a_budget_whatever_the_factor_is(factor):
    trials = searched(BudgetSpec(kl=0.02), factor, groups=100)
    assert len(trials) <= 2
    chosen = trials[best(trials)]
    assert chosen.holds
    assert chosen.measured >= 0.9 * 0.02
    assert chosen.nbytes == min(trial.nbytes for trial in trials if trial.holds)


def test_a_prediction_that_is_right_needs_one_trial():
    assert len(searched(BudgetSpec(kl=0.02), 1.2)) == 1


def test_two_sided_rounding_is_expected_to_exceed_its_prediction_by_more():
    kl, perplexity = BudgetSpec(kl=0.02), BudgetSpec(perplexity_ratio=1.02)
    assert usual_excess(kl, "two_sided") == 1.35
    assert usual_excess(kl, "gptq") == usual_excess(kl, "rtn") == 1.2
    assert usual_excess(perplexity, "two_sided") < usual_excess(kl, "two_sided")


def test_a_budget_that_everything_keeps_takes_the_smallest():
    (trial,) = searched(BudgetSpec(kl=5.0), 1.2)[:1]
    assert trial.nbytes == 500 + 20 * 1000


def test_limits_of_size_take_one_trial_and_are_kept():
    (trial,) = searched(BudgetSpec(bytes=30_500), 2.0)
    assert 29_500 < trial.nbytes <= 30_500
    (trial,) = searched(BudgetSpec(bits=6.0), 2.0)
    assert (trial.nbytes - 500) * 8 <= 6.0 * costs_of().elements


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (BudgetSpec(kl=1e-6), "the least predicted loss is at 8.000 bits a weight"),
        (BudgetSpec(bytes=20_000), r"the smallest is .* 20\.5 kB \(20500 bytes\)"),
        (BudgetSpec(bits=3.9), "the smallest is 4.000 bits"),
        (BudgetSpec(perplexity_ratio=1.0000001), "cannot be kept"),
    ],
)
def test_a_budget_that_nothing_keeps_is_refused_with_what_is_least(budget, told):
    refused_recipe(told, searched, budget, 1.0)


def test_candidates_are_what_the_target_multiplies_fast():
    weights = ["w4", "w4_g64", "w4_g32", "w4_per_channel", "w8"]
    for target in ("cpu", "gpu", "vllm"):
        assert list(candidates(PRESETS["w4"].of_layers, target)) == weights
    inputs = ["a8w4", "a8w4_g64", "a8w4_g32", "a8w4_per_channel", "a8w8_dynamic"]
    assert list(candidates(PRESETS["a8w4"], "cpu")) == inputs
    assert list(candidates(PRESETS["a8w8"], "gpu"))[-1] == "a8w8"
    assert list(candidates(PRESETS["a8w8_dynamic"], "vllm")) == [*weights[:4], "a8w8_dynamic"]
    assert all(
        s.weights.two_level for s in list(candidates(PRESETS["a8w4_two_level"], "gpu").values())[:3]
    )
    assert list(candidates(PRESETS["fp8_channel"], "gpu")) == [*weights[:4], "af8wf8"]
    refused_recipe("multiplies no fp8", candidates, PRESETS["fp8_channel"], "cpu")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2.5GB", 2_500_000_000), ("2 GiB", 2 << 30), ("700 mb", 700_000_000), ("5e6", 5_000_000)],
)
def test_sizes_are_read_with_their_units(text, nbytes):
    assert BudgetSpec(bytes=text).bytes == read_bytes(text) == nbytes


def test_one_limit_is_given():
    for limits in ({}, {"kl": 0.1, "bits": 4.0}):
        refused("give one of them", BudgetSpec, **limits)
    refused("integer", BudgetSpec, bytes="much")


def test_check_and_explain_say_that_a_budget_chooses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "budget", "--no-time"]) == 0
    assert "kl=0.01 for cpu: a run chooses the weights" in capsys.readouterr().out
    assert cli.main(["explain", "budget", "--module", "model.layers.0.mlp.up_proj"]) == 0
    assert "or as kl=0.01 has it chosen" in capsys.readouterr().out
