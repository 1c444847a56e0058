"""`ptq sweep`: many recipes on many models, each a task of its own, and one table of them all.

    ptq sweep SPEC.yaml [--ray auto] [--cpus N]

Tasks run on this machine, or with --ray on a Ray cluster. A sweep that is stopped goes on when the
same command is given again: runs that ended are kept, others go on where they were, and those that
failed are tried again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from formats.command import CommandParser, bar, count
from formats.files import output_locked, replace_file
from formats.namespace import later
from ptq.commands.shared import add_quiet
from ptq.sweep.pools import LocalPool, RayPool
from ptq.sweep.tasks import Outcome, Task, left_to_run, plan_tasks, read_spec
from ptq.text import duration_text, typed_path

with later():
    import pandas
    import torch

    from ptq.report import comparison

TABLE = "sweep.md"


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq sweep`."""
    made = CommandParser(
        prog="ptq sweep",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit codes: 0 all ran and none is red, 1 one is, 2 a task failed.",
    )
    made.add_argument("spec", type=Path, help="YAML file: models, recipes, output")
    made.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto for this machine's, or HOST:PORT",
    )
    made.add_argument(
        "--cpus", type=count, metavar="N", help="without --ray: cores to use; default: all"
    )
    add_quiet(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has not run; 0 where all is well, 1 where thresholds are missed, 2 for failures."""
    arguments = parser().parse_args(argv)
    spec = read_spec(arguments.spec)
    tasks = plan_tasks(spec, arguments.spec.absolute().parent)
    output = Path(os.path.expanduser(spec.output)).absolute()
    with output_locked(output):
        left = left_to_run(tasks)
        outcomes = {task.name: ended for task in tasks if (ended := task.ended()) is not None}
        if outcomes and not arguments.quiet:
            print(f"{len(outcomes)} of {len(tasks)} tasks have run before")
        if left:
            outcomes |= _run(arguments, left)
        text = describe(tasks, outcomes)
        replace_file(output / TABLE, text.encode())
    print(f"\n{text}")
    print(f"table: {typed_path(output / TABLE)}")
    states = {outcome.state for outcome in outcomes.values()}
    return 2 if "failed" in states else 1 if "missed" in states else 0


def _run(arguments: argparse.Namespace, tasks: Sequence[Task]) -> dict[str, Outcome]:
    """Run tasks; how each ended, by its name."""
    pool = RayPool(arguments.ray) if arguments.ray else _local(arguments, tasks)
    pool.check(tasks)
    outcomes: dict[str, Outcome] = {}
    shown = not arguments.quiet
    with (
        bar(title="Sweeping", unit="task", total=len(tasks), shown=shown) as progress,
        closing(pool.run(tasks)) as ended,
    ):
        for task, outcome in ended:
            outcomes[task.name] = outcome
            if shown:
                took = duration_text(outcome.seconds)
                progress.write(f"{task.name}: {outcome.state} in {took} on {outcome.where}")
            progress.update()
    return outcomes


def _local(arguments: argparse.Namespace, tasks: Sequence[Task]) -> LocalPool:
    """This machine; it is only asked for GPUs where a task needs one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus: list[str] = []
    if any(task.resources.gpus for task in tasks):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(i) for i in range(torch.cuda.device_count())]
        gpus = visible.split(",")[: len(gpus)] if visible else gpus
    return LocalPool(arguments.cpus or cores or 1, gpus)


def table(tasks: Sequence[Task]) -> pandas.DataFrame | None:
    """The figures of all tasks that ran, as `ptq compare` has them; None where none did.

    Runs of one model that were measured on the same tokens stand together, the least KL divergence
    first; what was measured on other tokens is not to be compared and stands apart.
    """
    groups: dict[tuple[str, str], dict[str, Any]] = {}
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
    return pandas.concat(frames, ignore_index=True) if frames else None


def describe(tasks: Sequence[Task], outcomes: dict[str, Outcome]) -> str:
    """The table and what failed, as Markdown."""
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
