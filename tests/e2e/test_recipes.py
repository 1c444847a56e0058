"""Every shipped recipe on the default model, on few samples."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

import ptq
from ptq.commands.run import main
from ptq.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
IN_CI = os.environ.get("CI") == "true"
SMALLER = [  # the cases that show that a recipe runs, not how accurate it is
    word
    for split in ("calibration", "evaluation")
    for setting in (f"samples={8 if IN_CI else 3}", "sequence_length=256")
    for word in ("--set", f"dataset.{split}.{setting}")
]
# What they have of schemes and methods, others have; `test_solve.py` runs them all.
REPEATED = """
    a8w4 a8w4_two_level a8w4c4_two_level a8w4c8 a8w4c8_two_level a8w8_dynamic a8w8c8_dynamic_down
    a8w8c8_fp8 a8w8c8_gptq a8w8c8_static budget c8 fp8_block fp8_channel fp8_tensor mxfp4 mxfp8
    nvfp4 w4_best w4_head8 w4_rotated w4_two_sided w4c8 w8_gptq w8_rtn
""".split()
CASES = [
    pytest.param(name, marks=pytest.mark.ci if name in REPEATED else ())
    for name in RECIPES
    if name not in ("a8w8c8", "a8w8c8_unsmoothed")
]
SHORTEST = {"search_samples": 1, "iterations": 4}  # of a method's settings, where it has them
PICTURED = {"a8w8", "a8w8c8_dynamic_down", "w4_best"}  # all sections; the CI draws those of all


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory):
    """Runs a recipe on less data, once; gives its output and report."""
    made: dict[str, tuple[str, dict, Path]] = {}

    def run(name: str) -> tuple[str, dict, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            more = [] if name == "a8w8" else ["--set", "report.speed=false"]
            recipe, printed = ROOT / "recipes" / f"{name}.yaml", io.StringIO()
            for i, method in enumerate(load_recipe(recipe).methods):
                for setting, least in SHORTEST.items():
                    if hasattr(method, setting):
                        more += ["--set", f"methods.{i}.{method.name}.{setting}={least}"]
            with (
                contextlib.chdir(folder),
                contextlib.redirect_stdout(printed),
                pytest.MonkeyPatch.context() as patch,
            ):
                if name not in PICTURED and not IN_CI:
                    patch.setattr("ptq.report.report.draw_plots", lambda data: {})
                    more += ["--set", "report.attribution=false"]
                assert main([str(recipe), *SMALLER, *more]) in (0, 1)
            out = folder / "output" / name
            report = json.loads((out / "report" / "report.json").read_text())
            made[name] = printed.getvalue(), report, out
        return made[name]

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_recipe_runs_to_its_report(name: str, small_runs) -> None:
    output, report, folder = small_runs(name)
    assert 0.98 < report["accuracy"]["perplexity_ratio"] < 1.2, output
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script src" not in page
    assert not (folder / ".resume").exists()
    (folder / "new").touch()
    modes = {path.name: path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert set(modes.values()) == {modes["new"]}, modes
    (folder / "new").unlink()


@pytest.mark.ci  # runs recipes that nothing else does
@pytest.mark.timeout(600)
def test_no_int4_method_is_worse_than_rounding(small_runs) -> None:
    rounding, *others = (
        small_runs(name)[1]["accuracy"] for name in ("w4_rtn", "w4_gptq", "w4_awq", "w4_best")
    )
    for found in others:
        assert found["kl_mean"] < 0.7 * rounding["kl_mean"]
        assert found["perplexity_ratio"] < rounding["perplexity_ratio"]


@pytest.mark.timeout(600)
def test_the_resolved_recipe_reruns_to_the_same_bytes(small_runs, tmp_path) -> None:
    first, again = small_runs("a8w8c8_fp8")[2], tmp_path / "again"
    ptq.quantize(first / "recipe.yaml", output=again, progress=False)
    files = sorted(p.relative_to(first) for p in (first / "checkpoint").rglob("*") if p.is_file())
    assert len(files) >= 8
    different = [str(p) for p in files if (first / p).read_bytes() != (again / p).read_bytes()]
    # The resolved recipe inside the checkpoint names its own output; all else is the same.
    assert [p for p in different if "recipe" not in p and "manifest" not in p] == []
