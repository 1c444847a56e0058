"""Recipes are read strictly, resolved completely, and their resolved form repeats them."""

from pathlib import Path

import pytest
import yaml

from formats.errors import RecipeError
from formats.scheme import PRESETS
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.recipe.reading import load_recipe, resolved_yaml
from ptq.recipe.schema import Recipe
from ptq.recipe.strict_yaml import dump, override_value, parse

RECIPES = sorted((Path(__file__).resolve().parents[3] / "recipes").glob("*.yaml"))
SMALL = "model: {path: .}\nscheme: a8w8c8\nmethods: [rtn]\noutput: {path: out}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-2", 0.01),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("-7", -7),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-01-02", "2026-01-02"),
        (".inf", ".inf"),
        ("1e", "1e"),
        ("'1e-2'", "1e-2"),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    found = parse(f"a: {text}\n").data["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["1e-2", "on", "010", "0o7", "null", "", "a: b", "é", "2026-01-02"]
)
def test_dumped_text_stays_text(text):
    assert parse(dump({"a": [text]})).data == {"a": [text]}
    assert parse(override_value(text)).data == text


def test_anchors_and_merge_keys():
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  <<: [*a, *b]\n  x: 5\nd: *a\n"
    document = parse(text)
    assert document.problems == []
    assert document.data["c"] == {"x": 5, "y": 2, "z": 4}
    assert document.data["d"] == {"x": 1, "y": 2}
    assert document.origins[("c", "x")].line == 5
    assert document.origins[("c", "z")].line == 2


def test_every_value_has_its_line():
    origins = parse("a:\n  - 1\n  -\n    b: 2\n    c: 3\n", "r.yaml").origins
    assert {origin.source for origin in origins.values()} == {"r.yaml"}
    assert {key: origins[key].line for key in [("a",), ("a", 0), ("a", 1), ("a", 1, "c")]} == {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 1): 4,
        ("a", 1, "c"): 5,
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_loads_and_its_resolved_form_repeats_it(path, tmp_path):
    recipe = load_recipe(path)
    assert recipe.output.path == Path.cwd() / "output" / path.stem
    assert recipe.model.path == path.parent / "tiny-python"
    assert path.read_text(encoding="utf-8").startswith("# ")
    text = resolved_yaml(recipe)
    again = load_recipe(write(tmp_path, text))
    assert again == recipe
    assert resolved_yaml(again) == text


def test_the_recipes_that_are_promised_are_there():
    names = {path.stem for path in RECIPES}
    assert names >= {"a8w8c8", "a8w8c8_unsmoothed", "a8w8", "a8w8_dynamic", "c8", "a8w8c8_gptq"}
    assert names >= {"w8_rtn", "w4_rtn", "w4_gptq", "w4_awq", "w4_best", "a8w4", "a8w4c8"}
    assert names >= {"fp8_tensor", "fp8_channel", "fp8_block", "a8w8c8_fp8"}


def test_the_unsmoothed_recipe_is_the_main_one_without_smoothing(tmp_path):
    main, other = (load_recipe(RECIPES[0].parent / f"a8w8c8{s}.yaml") for s in ("", "_unsmoothed"))
    changed = {name for name in Recipe.model_fields if getattr(main, name) != getattr(other, name)}
    assert changed == {"methods", "output"}
    assert other.methods == (RTNSpec(),)


def test_defaults_are_spelled_out(tmp_path):
    recipe = load_recipe(write(tmp_path, SMALL))
    data = yaml.safe_load(resolved_yaml(recipe))
    assert set(data) == set(Recipe.model_fields) - {"layers", "budget"}  # there are none
    assert data["scheme"]["kv_cache"] == {"dtype": "int8", "granularity": "per_head"}
    assert data["ignore"] == ["lm_head"]
    assert data["model"]["path"] == str(tmp_path)
    assert data["methods"] == [{"rtn": {"scale": "absmax"}}]


def test_short_forms(tmp_path):
    text = SMALL.replace("[rtn]", "[{smoothquant: }, rtn]") + "report: {speed: false}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.methods == (SmoothQuantSpec(), RTNSpec())
    assert recipe.report.speed is None
    assert "speed: false" in resolved_yaml(recipe)
    assert recipe.scheme == PRESETS["a8w8c8"]
    assert load_recipe(write(tmp_path, text.replace("false", "true"))).report.speed is not None


def test_a_scheme_may_be_spelled_out(tmp_path):
    spelled = "{weights: {}, activations: {granularity: per_token}, kv_cache: {dtype: int8}}"
    recipe = load_recipe(write(tmp_path, SMALL.replace("a8w8c8", spelled)))
    assert recipe.scheme == PRESETS["a8w8c8_dynamic"]


def test_overrides(tmp_path):
    text = SMALL.replace("[rtn]", "[smoothquant, rtn]")
    recipe = load_recipe(
        write(tmp_path, text),
        [
            "dataset.calibration.samples=3",
            "scheme.kv_cache.granularity=per_tensor",
            "methods.0.smoothquant.alpha=5e-1",
            "methods.0.smoothquant.targets=[mlp_output]",
            "report.thresholds.kl=1e-2",
            "report.speed=false",
        ],
    )
    assert recipe.dataset.calibration.samples == 3
    assert recipe.scheme.kv_cache is not None
    assert recipe.scheme.kv_cache.granularity == "per_tensor"
    assert recipe.methods[0] == SmoothQuantSpec(alpha=0.5, targets=("mlp_output",))
    assert recipe.report.thresholds.kl == 0.01
    assert recipe.report.speed is None


def test_an_override_may_repair_what_the_file_has_wrong(tmp_path):
    path = write(tmp_path, SMALL.replace("a8w8c8", "a8w8c9"))
    assert load_recipe(path, ["scheme=a8w8"]).scheme == PRESETS["a8w8"]


def test_paths_start_at_the_recipe_or_where_they_are_typed(tmp_path, monkeypatch):
    folder, here = tmp_path / "recipes", tmp_path / "here"
    for path in (folder / "model", here / "mine"):
        path.mkdir(parents=True)
    (folder / "text.jsonl").write_text("{}\n")
    monkeypatch.chdir(here)
    path = write(folder, SMALL.replace("path: .", "path: model") + "dataset: {name: text.jsonl}\n")
    recipe = load_recipe(path)
    assert recipe.model.path == folder / "model"
    assert recipe.dataset.name == str(folder / "text.jsonl")
    assert recipe.output.path == here / "out"
    assert load_recipe(path, ["model.path=mine"]).model.path == here / "mine"
    assert load_recipe(path, ["dataset.name=stdlib"]).dataset.name == "stdlib"
    monkeypatch.chdir(tmp_path)
    assert load_recipe(write(here, resolved_yaml(recipe))) == recipe


def test_names_of_datasets_stay_names(tmp_path):
    text = SMALL + "dataset: {name: Salesforce/wikitext, config: wikitext-2-raw-v1}\n"
    assert load_recipe(write(tmp_path, text)).dataset.name == "Salesforce/wikitext"


def test_a_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path, SMALL)
    with pytest.raises(RecipeError, match=r"recipy\.yaml: cannot be read .*'recipe\.yaml'"):
        load_recipe(tmp_path / "recipy.yaml")


def test_a_recipe_may_start_from_another(tmp_path):
    (tmp_path / "bases").mkdir()
    (tmp_path / "model").mkdir()
    low = SMALL.replace("path: .", "path: ../model") + "report: {thresholds: {kl: 0.5}}\n"
    (tmp_path / "bases" / "low.yaml").write_text(low)
    text = "base: bases/low.yaml\nscheme: {kv_cache: {granularity: per_tensor}}\nreport: {speed: false}\n"
    recipe = load_recipe(write(tmp_path, text), ["report.thresholds.perplexity_ratio=2.0"])
    assert recipe.model.path == tmp_path / "model"
    assert recipe.scheme.weights == PRESETS["a8w8c8"].weights
    assert recipe.scheme.kv_cache is not None
    assert recipe.scheme.kv_cache.granularity == "per_tensor"
    assert recipe.report.thresholds.kl == 0.5
    assert recipe.report.thresholds.perplexity_ratio == 2.0
    assert recipe.report.speed is None
    assert "base" not in yaml.safe_load(resolved_yaml(recipe))


def test_faults_of_bases_say_whose_they_are(tmp_path):
    (tmp_path / "low.yaml").write_text(SMALL + "observers: {inputs: {}}\n")
    with pytest.raises(RecipeError, match=r"low\.yaml:\d+: observers\.inputs: unknown key"):
        load_recipe(write(tmp_path, "base: low.yaml\nscheme: c8\nmethods: []\n"))
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(RecipeError, match=r"circle: a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(tmp_path / "a.yaml")
    with pytest.raises(RecipeError, match="needed is the path of another recipe"):
        load_recipe(write(tmp_path, SMALL + "base: [x]\n"))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:1: base: no such recipe: nowhere\.yaml;"):
        load_recipe(write(tmp_path, "base: nowhere.yaml\n"))
