"""`ptq quantize`: a model and a scheme in the place of a recipe, from the shell and from Python."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import ptq
from calibrate.data import load_tokens
from formats.errors import RecipeError
from formats.scheme import PRESETS
from ptq import cli
from ptq.commands import quantize, run
from ptq.recipe.own_model import OTHER_NAMES, SCHEMES, shipped_paths
from ptq.recipe.reading import load_recipe

QUICK = ["--set", "report.speed=false", "--set", "report.thresholds.kl=1"]
ROWS = [{"prompt": f"def f{i}(x):\n    return {'x + ' * i}{i}\n"} for i in range(60)]


@pytest.fixture
def desk(tmp_path, monkeypatch, tiny_llama) -> Path:
    """A folder with a model and rows of one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own model").symlink_to(tiny_llama)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


@pytest.fixture
def given(monkeypatch) -> list[list[str]]:
    """What `ptq run` was given, which does nothing."""
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "main", lambda words: calls.append(words) or 0)
    return calls


@pytest.mark.parametrize("scheme", [*SCHEMES, *OTHER_NAMES])
def test_every_scheme_is_that_of_its_recipe(scheme, given, desk):
    assert quantize.main(["own model", "--scheme", scheme.upper(), "--force"]) == 0
    (words,) = given
    name = OTHER_NAMES.get(scheme, scheme)
    assert words[0] in shipped_paths()
    assert words[-1] == "--force"
    assert load_recipe(words[0]).scheme.widest == PRESETS[{"fp8": "fp8_channel"}.get(name, name)]


def test_it_is_a_run_that_can_be_pasted(given, desk, capsys):
    words = ["own model", "--recipe", "w4_best", "--data", "rows.jsonl", "--set", "device=cpu"]
    assert quantize.main(words) == 0
    got = given[0]
    settings = ["model.path=own model", "dataset.name=rows.jsonl", "dataset.column=prompt"]
    settings += ["dataset.fewer=true", "device=cpu"]
    assert got[0] == "w4_best"
    assert got[2::2] == [*settings, str(Path("output/own model-w4_best"))]
    assert "ptq run w4_best --set 'model.path=own model'" in capsys.readouterr().out
    assert quantize.main([*words, "--set", "dataset.fewer=true"]) == 0
    assert given[1].count("dataset.fewer=true") == 1
    recipe = load_recipe(got[0], [word for word in got if "=" in word])
    assert recipe.model.path == desk / "own model"
    assert recipe.dataset.name == str(desk / "rows.jsonl")


def test_without_data_it_says_what_it_measures_on(given, desk, capsys):
    assert quantize.main(["org/model", "--scheme", "w8", "--revision", "v1"]) == 0
    assert "Python source" in capsys.readouterr().out
    assert "model.revision=v1" in given[0]
    assert str(Path("output/model-w8")) in given[0]
    assert not any(word.startswith("dataset.") for word in given[0])
    (desk / "mine.yaml").write_text("base: c8\ndataset: {name: rows.jsonl, column: prompt}\n")
    assert quantize.main(["own model", "--recipe", "mine.yaml"]) == 0
    assert "Python source" not in capsys.readouterr().out
    assert str(Path("output/own model-mine")) in given[1]


def test_a_column_that_is_said_is_not_guessed(given, desk):
    (desk / "two.jsonl").write_text(json.dumps({"a": "x", "b": "y"}))
    with pytest.raises(RecipeError, match="cannot tell which column"):
        quantize.main(["own model", "--scheme", "w4", "--data", "two.jsonl"])
    words = ["own model", "--scheme", "w4", "--data", "two.jsonl", "--set", "dataset.column=b"]
    assert quantize.main(words) == 0
    assert "dataset.column=b" in given[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m"], "--scheme --recipe is required"),
        (["m", "--scheme", "w5"], "allowed: w4"),
        (["--scheme", "w4"], "required: MODEL"),
    ],
)
def test_too_little_and_unknown_schemes_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_one_small_file_of_rows_is_enough(desk, capsys):
    words = ["own model", "--scheme", "w8", "--data", "rows.jsonl", *QUICK]
    assert cli.main(["quantize", *words]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "calibration: " in out
    assert "asked for were 64 x 512" in out
    output = desk / "output" / "own model-w8"
    assert f"recipe:     {Path('output/own model-w8/recipe.yaml')}" in out
    recipe = load_recipe(output / "recipe.yaml")
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.folder)
    texts = [
        {tokenizer.decode(ids) for ids in load_tokens(recipe.dataset, tokenizer, split).sequences()}
        for split in ("calibration", "evaluation")
    ]
    used = [{row["prompt"] for row in ROWS if row["prompt"] in "".join(part)} for part in texts]
    assert all(used)
    assert not used[0] & used[1]
    again = ptq.quantize(output / "recipe.yaml", output="again", progress=False).checkpoint
    weights = [p / "model.safetensors" for p in (output / "checkpoint", again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_from_python_it_is_the_same(desk):
    settings = {"overrides": ["report.speed=false"], "progress": False}
    made = ptq.quantize(model="own model", scheme="W8A16", data="rows.jsonl", **settings)
    assert made.checkpoint == desk / "output" / "own model-W8A16" / "checkpoint"
    assert ptq.Checkpoint.open(made.checkpoint).scheme.wac == "w8"
    for wrong in ({}, {"scheme": "w4"}, {"recipe": "w8_rtn", "scheme": "w4"}):
        with pytest.raises(RecipeError, match="give a recipe, or a model and a scheme"):
            ptq.quantize(**wrong)
    with pytest.raises(RecipeError, match=r"no scheme 'awq'; .*allowed: w4, "):
        ptq.quantize(model="own model", scheme="awq")


@pytest.mark.parametrize("limit", ["kl=abc", "bits=99"])
def test_a_budget_is_refused_as_it_was_typed(limit, given, desk):
    with pytest.raises(RecipeError, match=rf"^--budget {limit}: budget\.") as refused:
        quantize.main(["own model", "--budget", limit])
    assert "--set" not in str(refused.value)
    assert given == []
