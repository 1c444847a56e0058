"""Report data judged by other thresholds than those of their recipe."""

from __future__ import annotations

from ptq.recipe.schema import ThresholdsSpec
from ptq.report.data import ReportData, check_thresholds, failure


def thresholds(data: ReportData, **limits: float) -> ReportData:
    checks = check_thresholds(ThresholdsSpec(**limits), data.accuracy)
    failures = tuple(failure(check) for check in checks if not check.holds)
    passed = not failures
    return data.model_copy(update={"checks": checks, "failures": failures, "passed": passed})
