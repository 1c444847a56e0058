"""Standard tasks that need no network, by lm-eval, where that is installed and the level asks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from formats.namespace import later
from ptq.certify.figures import TASKS, Row
from ptq.certify.setting import Pair, Setting

if TYPE_CHECKING:
    from ptq.evaluate import evaluation
else:
    evaluation = later("ptq.evaluate.evaluation")  # lm-eval, which only tasks need


def task_cases(setting: Setting) -> list[tuple[str, int]]:
    """Names of tasks, with how many items of each."""
    asked = setting.level.tasks if find_spec("lm_eval") is not None else 0
    return [(name, asked) for name in TASKS] if asked else []


def measure_tasks(pair: Pair, cases: Sequence[tuple[str, int]], bar: Any) -> list[list[Row]]:
    """A row for each item of each task: which of both models is right."""
    found = []
    for name, items in cases:
        both = []
        for engine in pair:
            metrics = evaluation.evaluate(engine, [name], limit=items, progress=False)
            both.append(next(metric.each for metric in metrics if metric.name == "acc"))
            bar.update()
        first, other = both
        found.append(
            [
                Row(case=f"{name} {i}", values={f"tasks.{name}": (first[i], other[i])})
                for i in sorted(first.keys() & other.keys())
            ]
        )
    return found
