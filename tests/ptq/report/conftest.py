"""One finished run and its report, which the tests of the report share."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.checkpoint.read import Checkpoint
from ptq.pipeline.driver import quantize
from ptq.plan.plan import build_plan
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import ThresholdsSpec
from ptq.report.data import ReportData, check_thresholds, failure
from ptq.report.report import Report, make_report
from tests.ptq.quantizing import write_recipe

REPORT = {
    "speed": {"batch": 2, "prompt_tokens": 16, "new_tokens": 4},
    "thresholds": {"perplexity_ratio": 1.5, "kl": 5.0, "top1_agreement": 0.01},
}


def write_smoothed(folder: Path, model: Path, **report: object) -> Path:
    """A recipe that smooths, into `folder / "out"`, with settings of its report."""
    methods = [{"smoothquant": {"alphas": [0.5, 0.9], "search_samples": 2}}, "rtn"]
    output = {"path": str(folder / "out")}
    keys = {"scheme": "a8w8c8", "methods": methods, "output": output, "report": REPORT | report}
    return write_recipe(folder, model, 4, 48, **keys)


def thresholds(data: ReportData, **limits: float) -> ReportData:
    """A report judged by other thresholds than those of its recipe."""
    checks = check_thresholds(ThresholdsSpec(**limits), data.accuracy)
    failures = tuple(failure(check) for check in checks if not check.holds)
    passed = not failures
    return data.model_copy(update={"checks": checks, "failures": failures, "passed": passed})


def measured(data: ReportData, **figures: object) -> ReportData:
    """A report with other figures of accuracy."""
    return data.model_copy(update={"accuracy": data.accuracy.model_copy(update=figures)})


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny_llama) -> Path:
    """A folder with a recipe of the tiny model and its text."""
    folder = tmp_path_factory.mktemp("a-private-place")
    write_smoothed(folder, tiny_llama)
    return folder


@pytest.fixture(scope="session")
def made(folder) -> Report:
    """The report of a finished run."""
    plan = build_plan(recipe := load_recipe(folder / "r.yaml"), Checkpoint.open(recipe.model.path))
    return make_report(quantize(plan, progress=False), plan, progress=False)
