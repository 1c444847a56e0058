"""Shipped recipes are found by name from any folder, tell what they are for, and may be a base."""

import json
from pathlib import Path

import pytest
import yaml

from formats.errors import RecipeError
from ptq import cli
from ptq.recipe.own_model import FOLDER, find_recipe, shipped_paths, shipped_recipes
from ptq.recipe.reading import load_recipe
from tests.refusals import refused_recipe

NAMES = list(shipped_paths())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_goes_by_its_name_from_anywhere(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.model.path == FOLDER / "tiny-python"
    assert recipe.output.path.parent == tmp_path / "output"


def test_a_file_wins_over_a_name_and_a_folder_does_not(tmp_path):
    (tmp_path / "c8").mkdir()
    assert find_recipe("c8") == FOLDER / "c8.yaml"
    (tmp_path / "a8w8").write_text("base: a8w8c8\noutput: {path: own}\n")
    assert load_recipe("a8w8").output.path == tmp_path / "own"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("a8w8c9", "no shipped recipe is called so; did you mean 'a8w8c8'"),
        ("recipes/a8w8c8.yaml", "a shipped recipe goes by its name: a8w8c8"),
        ("folder", "did you mean folder/recipe.yaml"),
    ],
)
def test_what_is_no_recipe_gets_a_suggestion(found, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "recipe.yaml").write_text("")
    refused_recipe(message, load_recipe, found)


def test_a_shipped_recipe_may_be_a_base(tmp_path):
    Path("mine.yaml").write_text("base: w4_gptq\noutput: {path: mine}\nbogus: 1\n")
    refused_recipe(r"mine\.yaml:3: bogus: unknown key", load_recipe, "mine.yaml")
    Path("mine.yaml").write_text("base: w4_gptq\noutput: {path: mine}\n")
    recipe, base = load_recipe("mine.yaml"), load_recipe("w4_gptq")
    assert recipe == base.model_copy(update={"output": recipe.output})
    Path("typo.yaml").write_text("base: w4_gptk\n")
    with pytest.raises(
        RecipeError, match=r"typo.yaml:1: base: .*w4_gptk, .*did you mean 'w4_gptq'"
    ):
        load_recipe("typo.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_recipe_runs_where_it_is_pasted(name, capsys):
    assert cli.main(["recipes", name]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)
    assert load_recipe("mine.yaml") == load_recipe(name)


def test_every_recipe_tells_its_purpose_in_its_first_line(capsys):
    recipes = shipped_recipes()
    assert cli.main(["recipes"]) == 0
    printed = capsys.readouterr().out
    for recipe in recipes:
        first = recipe.path.read_text(encoding="utf-8").split("\n")[0]
        assert first == f"# {recipe.purpose}"
        assert recipe.purpose.endswith(".")
        assert any(
            line.split()[:2] == [recipe.name, recipe.scheme] and line.endswith(recipe.purpose)
            for line in printed.split("\n")
        )
        command = f"ptq run {recipe.name}\n"
        assert command in recipe.path.read_text(encoding="utf-8")


def test_the_list_as_json(capsys):
    assert cli.main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == NAMES
    assert {row["scheme"] for row in rows if row["name"].endswith("w4_gptq")} == {"w4"}
    assert all(yaml.safe_load(Path(row["path"]).read_text()) for row in rows)


def test_an_unknown_name_is_refused_by_the_list(capsys):
    assert cli.main(["recipes", "w4_gtpq"]) == 2
    assert "did you mean 'w4_gptq'" in capsys.readouterr().err


def test_the_shipped_model_yields_to_a_folder_of_its_name(tmp_path):
    assert load_recipe("c8", ["model.path=tiny-python"]).model.path == FOLDER / "tiny-python"
    (tmp_path / "tiny-python").mkdir()
    assert load_recipe("c8", ["model.path=tiny-python"]).model.path == tmp_path / "tiny-python"
    refused_recipe("no such folder", load_recipe, "c8", ["model.path=tiny-pithon"])
