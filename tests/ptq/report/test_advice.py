"""What the report tells to try next: recipes that ship, and that lose less or are smaller."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from formats.families.registry import find_family
from formats.namespace import ROOT
from ptq.recipe.reading import load_recipe, read_recipe, resolved_yaml
from ptq.recipe.shipped import shipped_paths
from ptq.report import advice
from ptq.report.advice import LOSE_LESS, SAVE_MORE, advise, facts_of, shares_of, weakest
from ptq.report.data import ReportData
from ptq.report.measured.attribution import Attribution, Part
from ptq.report.pages import answers, change_first, in_a_line, top_of
from ptq.report.verdict import verdict_of
from tests.ptq.report.judging import thresholds

RESULTS = (ROOT / "recipes" / "RESULTS.md").read_text(encoding="utf-8")


def figures() -> dict[str, tuple[float, float]]:
    """KL divergence of each shipped recipe, and bytes of weights and cache as factors."""
    row = re.compile(r"\| `(\w+)` \|.*?\| x ([\d.]+) \| x ([\d.]+) \| x [\d.]+ \| ([\d.]+) \|")
    found = {m[1]: (float(m[4]), float(m[2]) * float(m[3])) for m in row.finditer(RESULTS)}
    assert len(found) > 20
    return found


def of_recipe(data: ReportData, name: str, **shares: float) -> ReportData:
    recipe = load_recipe(shipped_paths()[name])
    parts = tuple(Part(name=kind, kl=share) for kind, share in shares.items())
    told = Attribution(sequences=4, tokens=99, whole=1.0, unrounded=0.0, kinds=parts, blocks=parts)
    return data.model_copy(
        update={
            "recipe": resolved_yaml(recipe),
            "attribution": told if parts else "not asked for",
        }
    )


def test_rules_name_recipes_that_ship():
    assert {rule.recipe for rule in (*LOSE_LESS, *SAVE_MORE)} <= shipped_paths().keys()


@pytest.mark.parametrize("name", sorted(figures()))
def test_what_is_advised_lost_less_or_was_smaller_when_it_was_measured(made, name):
    kl, size = figures()[name]
    data = of_recipe(made.data, name)
    less, more = advise(data, save=False), advise(data, save=True)
    assert less.recipe != name
    if less.recipe:
        assert figures()[less.recipe][0] < kl
    else:
        assert name in ("w8_rtn", "c8")
    if more.recipe:
        assert figures()[more.recipe][1] < size
    else:
        assert name == "a8w4c4_two_level"


@pytest.mark.parametrize(
    ("name", "shares", "recipe", "reason"),
    [
        ("a8w8c8_unsmoothed", {}, "a8w8c8", "nothing evens out the channels of inputs"),
        (
            "a8w8c8",
            {"down": 0.7, "cache": 0.1, "o": 0.2},
            "a8w8c8_dynamic_down",
            "down, 70% of the loss,",
        ),
        ("a8w8c8", {"down": 0.1, "cache": 0.9}, "a8w8c8_dynamic_down", "the cache makes 90%"),
        ("a8w8c8_dynamic_down", {"cache": 0.6, "o": 0.4}, "a8w8_dynamic", "leaves it in float"),
        ("a8w4c8", {"cache": 0.6, "o": 0.4}, "a8w4", "leaves it in float"),
        ("a8w8c8_fp8", {"cache": 0.6, "o": 0.4}, "fp8_channel", "leaves it in float"),
        ("w4_rtn", {}, "w4_gptq", "GPTQ"),
        ("w4_gptq", {"down": 0.9, "o": 0.1}, "w4_best", "gradient descent"),
    ],
)
def test_rules_follow_what_was_measured(made, name, shares, recipe, reason):
    found = advise(of_recipe(made.data, name, **shares), save=False)
    assert found.recipe == recipe
    assert reason in found.reason
    assert found.command == f"ptq run {recipe} --output output/{recipe}"


def test_without_a_better_recipe_the_weakest_layers_stay_in_float(made):
    found = advise(of_recipe(made.data, "w8_rtn"), save=False)
    assert found.recipe == found.command == ""
    (option,) = re.findall(r"--set (.*)", found.reason)
    (setting,) = shlex.split(option)
    recipe = read_recipe(shipped_paths()["w8_rtn"], [setting]).recipe
    assert recipe.ignore == ("lm_head", *(name for name, _ in weakest(made.data)))


def test_the_command_runs_the_recipe_on_the_same_model_and_data(made, folder: Path):
    found = advise(made.data, save=False)
    words = shlex.split(found.command)
    assert words[:3] == ["ptq", "run", found.recipe]
    assert words[-2:] == ["--output", f"output/{found.recipe}"]
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    own = load_recipe(folder / "r.yaml")
    again = load_recipe(shipped_paths()[found.recipe], settings)
    assert (again.model, again.dataset) == (own.model, own.dataset)
    recipe = own.model_copy(update={"dataset": own.dataset.model_copy(update={"column": "2024"})})
    odd = made.data.model_copy(update={"recipe": resolved_yaml(recipe)})
    assert """--set 'dataset.column="2024"'""" in advise(odd, save=False).command


def test_facts_are_those_of_the_run(made):
    facts = facts_of(made.data)
    assert (facts.weights, facts.activations, facts.cache) == ("int8", "static", "int8")
    assert facts.methods == {"smoothquant", "rtn"}
    assert sum(facts.shares.values()) == pytest.approx(1.0)
    assert list(facts.shares.values()) == sorted(facts.shares.values(), reverse=True)
    assert facts.outlier > 1


def test_the_top_answers_what_now(made):
    labels = [point.label for point in top_of(made.data).points]
    assert labels[:3] == ["Threshold"] * 3
    assert {"Careful", "Loss comes from", "Weakest layers"} < set(labels)
    for limit, light, first in ((1.5, "green", "To lose less"), (0.5, "red", "Change first")):
        data = thresholds(made.data, perplexity_ratio=limit)
        accuracy = data.accuracy.model_copy(update={"perplexity_ratio_ci": (0.99, 1.01)})
        data = data.model_copy(update={"accuracy": accuracy})
        assert verdict_of(data).light == light
        assert answers(data)[0][0] == first
        line = in_a_line(data)
        assert line.startswith(f"{light.capitalize()}: ")
        assert f"{first}: {advise(data, save=False).recipe}." in line
        assert f"{next(iter(shares_of(data)))}: " in line
        assert "\n" not in line
        command = advise(data, save=False).command
        assert change_first(data) == (command if light == "red" else "")


def test_layers_whose_output_was_not_measured_are_ranked_by_their_weights(made):
    rows = [
        row.model_copy(update={"output_sqnr_db": None}) for row in made.data.quantization.modules
    ]
    record = made.data.quantization.model_copy(update={"modules": tuple(rows)})
    found = weakest(made.data.model_copy(update={"quantization": record}))
    least = min(row.weight_sqnr_db for row in rows if row.weight_sqnr_db is not None)
    assert found[0][1] == least
    assert len(found) == advice.WEAKEST


@pytest.mark.parametrize(
    ("name", "shares", "declared", "undeclared"),
    [
        ("c8", {}, "", ""),
        ("a8w8c8_unsmoothed", {"cache": 0.9}, "a8w8c8_dynamic_down", "a8w8_dynamic"),
        ("a8w8c8", {}, "a8w8c8_dynamic_down", "a8w8_dynamic"),
    ],
)
def test_no_recipe_is_advised_whose_methods_do_not_know_the_model(
    made, name, shares, declared, undeclared
):
    data = of_recipe(made.data, name, **shares)
    assert advise(data, save=False).recipe == declared
    other = data.model_copy(
        update={"model": data.model.model_copy(update={"model_type": "nothing_declares_it"})}
    )
    assert advise(other, save=False).recipe == undeclared
    for save in (False, True):
        if found := advise(other, save=save).recipe:
            methods = load_recipe(shipped_paths()[found]).methods
            assert not any(method.needs_declaration for method in methods)


def test_rotation_knows_no_family_with_norms_after_its_layers():
    (rotation, *_) = load_recipe(shipped_paths()["w4_rotated"]).methods
    assert rotation.knows(find_family({"model_type": "llama"}))
    assert not rotation.knows(find_family({"model_type": "gemma3_text"}))
    assert not rotation.knows(None)
