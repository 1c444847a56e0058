"""The page of recipe keys: what the models say, whole, and up to date."""

import re
from pathlib import Path

import pytest

from formats.scheme import PRESETS
from ptq.methods.common.spec import Stage
from ptq.methods.registry import METHODS
from ptq.recipe import reference
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import Recipe

PAGE = Path(__file__).parents[3] / "recipes/KEYS.md"


def test_the_page_is_what_the_models_say():
    assert PAGE.read_text() == reference.page(), (
        "recipes/KEYS.md is old: python -m ptq.recipe.reference > recipes/KEYS.md"
    )


@pytest.mark.parametrize(
    "model", dict.fromkeys(m for _, m in reference.sections(Recipe)), ids=lambda m: m.__name__
)
def test_every_key_tells_its_meaning(model):
    told = reference.meanings(model)
    silent = [key for key in model.model_fields if not told.get(key) and key != "name"]
    assert not silent, f"{model.__name__}: write a docstring below {', '.join(silent)}"


def test_every_method_and_preset_has_its_place():
    page = PAGE.read_text()
    assert re.findall(r"^## methods: (\w+)$", page, re.M) == list(METHODS)
    assert all(f"| `{name}` |" in page for name in PRESETS)


def test_links_of_the_page_lead_to_its_sections():
    page = PAGE.read_text()
    headings = {f"#{reference.anchor(text)}" for text in re.findall(r"^## (.*)$", page, re.M)}
    assert set(re.findall(r"\]\((#[^)]*)\)", page)) <= headings


def test_examples_of_methods_can_be_pasted(tmp_path):
    """Each stands in a recipe as it is shown."""
    model = tmp_path / "model"
    model.mkdir()
    examples = re.findall(r"^## methods: (\w+)$.*?```yaml\n(.*?)```", PAGE.read_text(), re.M | re.S)
    for name, example in examples:
        stage = METHODS[name].stage
        weights = "" if stage == Stage.ROUND else "  - rtn\n"
        first = "  - rtn\n" if stage == Stage.REFINE else ""
        example = example.replace("methods:\n", f"methods:\n{first}")
        text = f"model: {{path: model}}\nscheme: a8w8c8\noutput: {{path: out}}\n{example}"
        path = tmp_path / "recipe.yaml"
        path.write_text(text + ("" if first else weights))
        assert name in [method.name for method in load_recipe(path).methods]
