"""Certificates of recipes as rows of a table, and where the page shows them."""

from __future__ import annotations

import math

import pytest

from formats.errors import RecipeError
from ptq.certify.certificate import Certificate, Made
from ptq.certify.figures import Row, judge, overall
from recipes import results


def certificate(kl: float, fits: float) -> Certificate:
    cases = [
        Row(case=f"case {i}", values={
            "kl.prose": (0.0, kl + i * 1e-4), "answers.equal": (1.0, float(i % 4 == 0)),
            "answers.length": (3.0, 3.0 + math.log(1.5)), "answers.no_loop": (1.0, float(i >= 1)),
            "objects.fit": (1.0, float(i >= fits)),
        })
        for i in range(40)
    ]  # fmt: skip
    figures = judge(cases, 0.05)
    verdict, headline = overall(figures)
    made = Made(
        when="2026-01-02 03:04:05", version="1", environment={"processor": "Chip"}, device="cpu",
        level="quick", seed=0, prompts=None, prompts_sha256=None, against="m", against_config="",
        weights={}, seconds=61.4, processor_seconds=60.0,
    )  # fmt: skip
    return Certificate(
        verdict=verdict, headline=headline, limit=0.05, limit_from="", made=made,
        figures=tuple(figures), rows={},
    )  # fmt: skip


def test_a_row_names_what_is_beyond_its_limit():
    row = results.certificate_row("tiny", "a8w8c8", certificate(0.01, 0))
    assert row["verdict"] == "red"
    assert row["beyond their limit"] == "answers.length (red)"
    assert (row["KL of prose"], row["their length"], row["device"]) == ("0.0119", "x 1.50", "Chip")
    assert (row["answers equal"], row["loops"]) == ("25%", "0% / 3%")
    assert (row["JSON that fits"], row["of code"], row["seconds"]) == ("100% / 100%", "", "61")
    worse = results.certificate_row("tiny", "w4", certificate(0.2, 20))
    assert worse["JSON that fits"] == "100% / 50%"
    assert "kl.prose (red)" in worse["beyond their limit"]
    assert "objects.fit (red)" in worse["beyond their limit"]


def test_rows_are_kept_by_model_and_recipe_and_shown_in_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "CERTIFIED", tmp_path / "certified.csv")
    row = results.certificate_row("tiny", "w4", certificate(0.02, 0))
    results.record_certificates([row, row | {"recipe": "w8", "KL of prose": "0.0010"}])
    results.record_certificates([row | {"verdict": "amber"}])
    assert [r["recipe"] for r in results.certificate_rows()] == ["w8", "w4"]
    page = "# All\n\n<!-- certificates: tiny -->\n| old |\n\nand more\n"
    shown = results.with_certificates(page)
    assert results.with_certificates(shown) == shown
    place, head, rule, *rows, empty, last = shown.splitlines()[2:]
    assert place == "<!-- certificates: tiny -->"
    assert head.startswith("| recipe | verdict | KL of prose | of code |")
    assert rule.count("---") == head.count("|") - 1
    assert [line.split(" | ")[:2] for line in rows] == [["| `w8`", "red"], ["| `w4`", "amber"]]
    assert (empty, last) == ("", "and more")
    with pytest.raises(RecipeError, match="no place for the certificates of tiny"):
        results.with_certificates("# All\n")


def test_the_page_shows_the_certificates_as_they_are():
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.with_certificates(page) == page, "RESULTS.md is old: python -m recipes.results"
