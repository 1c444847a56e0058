"""Runs tasks on an engine: those of lm-eval, and ours that need no network."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from io import StringIO
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from formats.errors import RequestError
from formats.scheme import either
from inference.engine import Engine
from ptq.evaluate import local_tasks
from ptq.evaluate.engine_lm import EngineLM
from ptq.evaluate.figures import Metric


def evaluate(
    engine: Engine,
    tasks: Sequence[str],
    *,
    adapter: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    allow_code: bool = False,
    progress: bool = True,
) -> list[Metric]:
    """Run tasks.

    Args:
        engine: Idle.
        tasks: Names of local tasks, `local` for all of these, or of lm-eval's own, whose data is
            read from the hub.
        adapter: The name of one of the engine's adapters, which the tasks run with.
        limit: Most items of a task.
        num_fewshot: Examples before each item; None leaves it to the task.
        chat: Ask through the model's chat template.
        allow_code: Run what the model has written, where a task does that.

    Raises:
        RequestError: there is no such task, its data cannot be had, or it runs code and that is not
            allowed.
    """
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # lm-eval would fork a pool to resample, whose workers have our handler of the signal that is to
    # end them: it waits for them forever.
    os.environ["DISABLE_MULTIPROC"] = "1"
    lm = EngineLM(engine, adapter=adapter, progress=progress)
    names = [own for name in tasks for own in _expanded(name, allow_code=allow_code)]
    found: list[Metric] = []
    local = all(name in local_tasks.NAMES for name in names)
    known = TaskManager(include_defaults=not local)  # reads thousands of files for its own
    for name in dict.fromkeys(names):
        with _told_elsewhere(progress), _data_of(name):
            result = simple_evaluate(
                lm,
                tasks=[_task(name, lm, known)],
                task_manager=known,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=chat,
                bootstrap_iters=1000,
                confirm_run_unsafe_code=allow_code,
            )
        assert result is not None
        found += _metrics(result)
    return found


@contextmanager
def _told_elsewhere(progress: bool) -> Iterator[None]:
    """Keep what lm-eval prints out of the result: on stderr, or nowhere without progress."""
    with ExitStack() as stack:
        if not progress:
            stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def _data_of(name: str) -> Iterator[None]:
    """Say of which task the data cannot be had: `datasets` reads them from the hub."""
    try:
        yield
    except OSError as error:  # of `datasets` and the hub, each of its own kind
        reason = " ".join(str(error).split())
        raise RequestError(
            f"{name}: its data cannot be had ({reason}). They come from the hub: check the "
            "network, or give `local`, the tasks that need none",
            "tasks",
        ) from error


def _expanded(name: str, *, allow_code: bool) -> list[str]:
    """The tasks that a name stands for."""
    if name == "local":
        return [n for n in local_tasks.NAMES if allow_code or n not in local_tasks.UNSAFE]
    if name in local_tasks.UNSAFE and not allow_code:
        raise RequestError(
            f"{name}: it runs what the model writes; allow that with --allow-code, for a model "
            "that you trust",
            "tasks",
        )
    return [name]


def _task(name: str, lm: EngineLM, known: TaskManager) -> Any:
    """A task as `simple_evaluate` takes it."""
    if name in local_tasks.NAMES:
        model = local_tasks.Text(encode=lm.tok_encode, longest=lm.max_length)
        return ConfigurableTask(config=local_tasks.task_config(name, model))
    if name not in known.all_tasks:
        own = ["local", *local_tasks.NAMES]
        close = get_close_matches(name, [*own, *known.all_tasks], n=3)  # of thousands
        guess = f"did you mean {either(close)}? " if close else ""
        allowed = f"allowed: {', '.join(own)}, and what `lm-eval ls tasks` lists"
        raise RequestError(f"no task {name!r}; {guess}{allowed}", "tasks")
    return name


def _metrics(result: Mapping[str, Any]) -> list[Metric]:
    """lm-eval's results, metric by metric."""
    found = []
    for task, values in result["results"].items():
        samples = result["samples"].get(task, [])
        for key, value in values.items():
            name, _, _ = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            stderr = values.get(key.replace(name, f"{name}_stderr", 1))
            each = {s["doc_id"]: float(s[name]) for s in samples if s.get(name) in (0, 1)}
            found.append(
                Metric(
                    task=task,
                    name=name,
                    value=value,
                    stderr=stderr if isinstance(stderr, float) and math.isfinite(stderr) else None,
                    higher_is_better=result["higher_is_better"].get(task, {}).get(name, True),
                    items=values.get("sample_len", len(samples)),
                    each=each if len(each) == len(samples) else {},
                )
            )
    return found
