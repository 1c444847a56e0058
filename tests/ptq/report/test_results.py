"""The figures of recipes: kept from runs, and shown where they are claimed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from formats.errors import RecipeError
from formats.namespace import ROOT
from ptq.report import known
from recipes import results, run_all


def loss(model: str, recipe: str) -> float | None:
    rows = {(row.model, row.recipe): row.kl for row in known.known_figures()}
    return rows.get((model, recipe))


def test_the_page_shows_the_table_as_it_is():
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.written(page) == page, "RESULTS.md is old: python -m recipes.results"


def test_a_model_without_a_place_in_the_page_is_told():
    with pytest.raises(RecipeError, match="no table of SmolLM2-135M-Instruct; write the line"):
        results.written("<!-- table: tiny-python -->\n")


def test_the_readme_claims_what_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (.*`.*) \| .* \| (.*) \| (.*) \|$", text, re.MULTILINE)
    shown = 0
    for names, *claims in rows[1:]:
        recipes = re.findall(r"`(\w+)`", names)
        for model, claim in zip(("tiny-python", "SmolLM2-135M-Instruct"), claims, strict=True):
            for recipe, figure in zip(recipes, claim.split("; "), strict=True):
                found, digits = loss(model, recipe), len(figure.partition(".")[2])
                assert figure == ("–" if found is None else f"{found:.{digits}f}"), (model, recipe)
                shown += 1
    assert shown == 30


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Empty tables, and a page with room for one model."""
    path = tmp_path / "measured.csv"
    monkeypatch.setattr(known, "TABLE", path)
    monkeypatch.setattr(results, "CERTIFIED", tmp_path / "certified.csv")
    page = tmp_path / "RESULTS.md"
    monkeypatch.setattr(results, "PAGE", page)
    page.write_text("<!-- table: tiny-llama -->\n\nand more\n")
    known.write_figures([])
    return page


def test_runs_of_a_model_are_kept_and_shown(made, table, tmp_path, monkeypatch, capsys):
    def runs(name: str, model: Path, folder: Path, settings: list[str]) -> None:
        report = folder / name / "report" / "report.json"
        report.parent.mkdir(parents=True)
        report.write_text(made.data.model_dump_json())

    monkeypatch.setattr(run_all, "run_recipe", runs)
    (tmp_path / "tiny-llama").mkdir()
    words = [str(tmp_path / "tiny-llama"), "--output", str(tmp_path / "out"), "--record"]
    words += ["--recipes", "a8w8c8", "--text", "words", "--original-bits", "tiny-llama=4"]
    assert run_all.main(words) == 0
    report = made.data
    (row,) = known.known_figures()
    assert (row.model, row.recipe, row.original_bits) == ("tiny-llama", "a8w8c8", 4)
    assert row.kl == pytest.approx(report.accuracy.kl_mean, rel=1e-3)
    assert report.accuracy.kl_mean_ci is not None
    assert (row.kl_low, row.kl_high) == pytest.approx(report.accuracy.kl_mean_ci, rel=1e-3)
    assert row.text.startswith("words, ")
    assert row.parameters == report.model.parameters
    head, _, line, *_, last = table.read_text().splitlines()[1:]
    assert head.startswith("| recipe | scheme")
    assert line.startswith("| `a8w8c8` | a8w8c8 | ")
    assert last == "and more"
    assert "<!-- a8w8c8 -->" in (tmp_path / "results-tiny-llama.svg").read_text()
    assert line.rsplit("|", 2)[0] in capsys.readouterr().out  # but for the rounded seconds
    with pytest.raises(RecipeError, match="--original-bits tiny=4: needed is the name of a model"):
        run_all.main([*words[:-1], "tiny=4"])
