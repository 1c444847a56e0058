"""What a sweep found: one table of all runs, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ptq.peers.measure import PeersRecord
from ptq.report import comparison
from ptq.report.data import ReportData
from ptq.sweep.tasks import Outcome, Task


def table(tasks: Sequence[Task]) -> pd.DataFrame | None:
    """The figures of all tasks that ran, as `ptq compare` has them; None where none did.

    Runs of one model that were measured on the same tokens stand together, the least KL divergence
    first; what was measured on other tokens is not to be compared and stands apart.
    """
    groups: dict[tuple[str, str], dict[str, ReportData | PeersRecord]] = {}
    for task in tasks:
        if task.has_report:
            ((name, report),) = comparison.load_reports([task.output]).items()
            key = task.model, report.evaluation.fingerprint
            groups.setdefault(key, {})[name] = report
    models = [model for model, _ in groups]
    frames = []
    for (model, fingerprint), reports in groups.items():
        alone = models.count(model) == 1
        frame = comparison.table(reports)
        frame.insert(0, "model", model if alone else f"{model}, tokens {fingerprint[:6]}")
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else None


def describe(tasks: Sequence[Task], outcomes: dict[str, Outcome]) -> str:
    """The table and what failed, as Markdown.

    Args:
        tasks: Of the sweep.
        outcomes: How each ended, by its name.
    """
    found: list[Any] = []
    frame = table(tasks)
    if frame is not None:
        found.append(comparison.markdown(frame))
    missed = [task.name for task in tasks if outcomes[task.name].state == "missed"]
    if missed:
        found.append(f"Red: {', '.join(missed)} (their reports tell why).\n")
    failed = [task for task in tasks if outcomes[task.name].state == "failed"]
    if failed:
        lines = [f"{len(failed)} of {len(tasks)} tasks failed:\n"]
        for task in failed:
            error = (outcomes[task.name].error or "").replace("\n", "\n  ")
            lines += [
                f"- {task.name}: {error}\n",
                f"      {task.command}\n",
                f"  Log: {task.log}\n",
            ]
        found.append("\n".join(lines))
    return "\n".join(found)
