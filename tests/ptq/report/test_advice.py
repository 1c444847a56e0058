"""What the report tells to try next: recipes that ship, and that lose less or are smaller."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from formats.families.registry import find_family
from ptq.recipe.own_model import shipped_paths
from ptq.recipe.reading import load_recipe, read_recipe, resolved_yaml
from ptq.report import advice
from ptq.report.advice import advise, own_bits, recipe_bits, shares_of, weakest
from ptq.report.attribution import Attribution, Part
from ptq.report.data import ReportData
from ptq.report.known import Known, known_figures
from ptq.report.report import answers, change_first, in_a_line, top_of
from ptq.report.verdict import verdict_of
from tests.ptq.report.conftest import measured, thresholds

SMOLLM: dict[str, object] = {"model_type": "llama", "parameters": 135_000_000}


def costs(row: Known) -> tuple[float, float]:
    """Bits of weights and of the cache, all of them at once and in the cache alone."""
    bits = recipe_bits(row.recipe)
    return bits.total, bits.cache


def tiny() -> dict[str, Known]:
    """What the shipped recipes lose on the default model."""
    return {row.recipe: row for row in known_figures() if row.model == "tiny-python"}


def of_recipe(
    data: ReportData, name: str, model: dict[str, object] | None = None, **shares: float
) -> ReportData:
    """A report as one of a shipped recipe, on the default model or on one such as another."""
    recipe = load_recipe(shipped_paths()[name])
    parts = tuple(Part(name=kind, kl=share) for kind, share in shares.items())
    told = Attribution(sequences=4, tokens=99, whole=1.0, unrounded=0.0, kinds=parts, blocks=parts)
    return data.model_copy(
        update={
            "recipe": resolved_yaml(recipe),
            "scheme": tiny()[name].scheme,
            "attribution": told if parts else "not asked for",
            "model": data.model.model_copy(update=model or {"parameters": 7_344_384}),
        }
    )


def test_every_row_names_a_recipe_that_ships():
    assert {row.recipe for row in known_figures()} <= shipped_paths().keys()
    assert len(tiny()) > 20


@pytest.mark.parametrize("name", sorted(tiny()))
def test_what_is_advised_lost_less_or_was_smaller_when_it_was_measured(made, name):
    data = of_recipe(made.data, name)
    less, more = advise(data, save=False), advise(data, save=True)
    assert less.recipe != name
    if less.recipe:
        assert tiny()[less.recipe].kl <= 0.8 * tiny()[name].kl
    else:
        assert name in ("w8_gptq", "c8")
    if more.recipe:
        assert costs(tiny()[more.recipe]) < costs(tiny()[name])
    else:
        assert name == "a8w4c4_two_level"


@pytest.mark.parametrize(
    ("name", "shares", "recipe", "reason"),
    [
        ("a8w8c8_unsmoothed", {}, "a8w8c8", "it lost 0.00234, where `a8w8c8_unsmoothed` lost"),
        ("a8w8c8_static", {"down": 0.7, "o": 0.3}, "a8w8c8", "where `a8w8c8_static` lost 0.0061"),
        (
            "a8w8c8_static",
            {"down": 0.1, "cache": 0.9},
            "a8w8_dynamic",
            "a cache of 16 bits in place of 8",
        ),
        ("c4", {}, "k8v4", "a cache of 6 bits in place of 4"),
        ("w4_rtn", {}, "w4_two_sided", "it lost 0.0344, where `w4_rtn` lost 0.124"),
        ("a8w4", {}, "w4_two_sided", "inputs of layers in float"),
        ("w4_best", {}, "w8_rtn", "weights of 8 bits in place of 4.125"),
    ],
)
def test_advice_follows_what_was_measured(made, name, shares, recipe, reason):
    found = advise(of_recipe(made.data, name, **shares), save=False)
    assert found.recipe == recipe
    assert reason in found.reason
    assert "on tiny-python (7 M parameters; Python's standard library" in found.reason
    assert found.command == f"ptq run {recipe} --output output/{recipe}"


def test_advice_is_that_of_the_nearest_model(made):
    found = advise(of_recipe(made.data, "a8w8c8_static", SMOLLM), save=False)
    assert found.recipe == "a8w8c8_gptq"
    assert found.reason.startswith("on SmolLM2-135M-Instruct (135 M parameters; English prose")
    more = advise(of_recipe(made.data, "a8w8c8", SMOLLM), save=True)
    alike = {"w4c8", "a8w4c8", "a8w4c8_two_level"}  # of which the quickest is named
    assert more.recipe in alike
    assert "on tiny-python" in more.reason, "they were measured on another model alone"


@pytest.mark.parametrize("name", ["w4_gptq", "w4_rotated", "w4_awq", "w8_rtn"])
def test_channels_that_stand_out_are_said_where_nothing_evens_them(made, name):
    data = of_recipe(made.data, name)
    assert "times its median one" not in advise(data, save=False).reason
    rows = tuple(row.model_copy(update={"ratio": 55.0}) for row in data.outliers)
    assert any(row.role == "input" for row in rows)
    uneven = data.model_copy(update={"outliers": rows})
    told = "is mostly 55 times its median one: the method `rotation`, as in w4_rotated"
    assert (told in advise(uneven, save=False).reason) == (name == "w4_gptq")
    assert "times its median one" not in advise(uneven, save=True).reason


def test_groups_that_a_recipe_leaves_open_are_those_that_fit_the_model(made):
    data = of_recipe(made.data, "w4_gptq")
    found = data.quantization
    rows = [row.model_copy(update={"shape": (576, 576)}) for row in found.modules]
    settled = read_recipe(shipped_paths()["w4_gptq"], ["scheme.weights.group_size=64"]).recipe
    own = {"scheme": "w4_g64", "recipe": resolved_yaml(settled)}
    found = found.model_copy(update={"modules": tuple(rows)})
    more = advise(data.model_copy(update={"quantization": found, **own}), save=True)
    assert "a cache of 8 bits in place of 16" in more.reason
    assert "weights of" not in more.reason, "128 does not divide 576: every recipe takes 64"
    assert f"where `w4_gptq` lost {tiny()['w4_gptq'].kl:.3g}" in more.reason, "by groups of 128"


def test_bits_are_the_mean_of_layers_that_have_their_own(made):
    settings = ["layers=[{match: ['re:.*mlp.*'], scheme: w4}]"]
    mixed = resolved_yaml(read_recipe(shipped_paths()["w8_rtn"], settings).recipe)
    data = made.data.model_copy(update={"recipe": mixed, "scheme": "w8, mixed"})
    sizes = [(math.prod(r.shape), "mlp" in r.module) for r in made.data.quantization.modules]
    low = sum(size for size, small in sizes if small) / sum(size for size, _ in sizes)
    assert 4 < own_bits(data).weights < 8
    assert own_bits(data).weights == pytest.approx(8 - (8 - 4.125) * low, abs=0.2)
    found = advise(data, save=True).recipe
    assert recipe_bits(found).weights < own_bits(data).weights, "int8 alone would be larger"


def test_without_a_better_recipe_the_weakest_layers_stay_in_float(made):
    found = advise(of_recipe(made.data, "w8_gptq"), save=False)
    assert found.recipe == found.command == ""
    (option,) = re.findall(r"--set (.*)", found.reason)
    (setting,) = shlex.split(option)
    recipe = read_recipe(shipped_paths()["w8_gptq"], [setting]).recipe
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


def test_the_top_answers_what_now(made):
    labels = [point.label for point in top_of(made.data).points]
    assert labels[:3] == ["Threshold"] * 3
    assert {"Careful", "Loss comes from", "Weakest layers"} < set(labels)
    for limit, light, first in ((1.5, "green", "To lose less"), (0.5, "red", "Change first")):
        data = thresholds(made.data, perplexity_ratio=limit)
        data = measured(data, perplexity_ratio_ci=(0.99, 1.01))
        assert verdict_of(data).light == light
        assert answers(data)[0][0] == first
        line = in_a_line(data)
        assert line.startswith(f"{light.capitalize()}: ")
        assert f"{first}: {advise(data, save=False).recipe}." in line
        assert f"% of the loss comes from {next(iter(shares_of(data)))}." in line
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
        ("a8w8c8_unsmoothed", {"cache": 0.9}, "a8w8_dynamic", "a8w8_dynamic"),
        ("a8w8c8_static", {}, "a8w8c8", "a8w8c8"),
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
            assert all(method.knows(None) for method in methods)


def test_rotation_knows_no_family_with_norms_after_its_layers():
    (rotation, *_) = load_recipe(shipped_paths()["w4_rotated"]).methods
    assert rotation.knows(find_family({"model_type": "llama"}))
    assert not rotation.knows(find_family({"model_type": "gemma3_text"}))
    assert not rotation.knows(None)
