"""`ptq eval`: standard tasks on a checkpoint, by lm-eval on our engine.

    ptq eval CHECKPOINT --tasks local [--against ORIGINAL] [--output FILE.json]
    ptq eval CHECKPOINT --tasks lambada_openai,piqa,wikitext --limit 500
    ptq eval CHECKPOINT --tasks local --adapter sql=adapters/sql

`local` stands for the tasks that need no network (`ptq.evaluate.local_tasks`); others are lm-eval's
own, whose data comes from the Hugging Face hub. With `--against`, the same is run on another model,
such as the original, and the table tells what is left, with a 95% interval of paired items, and on
how many items the answers flipped. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from formats.command import CommandParser, count
from formats.errors import RequestError
from formats.files import replace_file
from formats.gguf.locate import locate_model
from formats.hub import model_argument
from formats.namespace import later
from inference.arguments import (
    add_adapter_argument,
    add_engine_arguments,
    open_engine,
    read_adapters,
)
from ptq.commands.shared import add_quiet
from ptq.text import format_table, typed_path

if TYPE_CHECKING:
    from ptq.evaluate.figures import Metric
with later():
    from ptq.evaluate import evaluation, figures

BATCH = 32  # requests that run at once


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq eval`."""
    made = CommandParser(
        prog="ptq eval",
        description="Run standard tasks on a checkpoint.",
        epilog="Tasks without a network: local (all of them), python_cloze, python_choice, "
        "python_pairs, python_perplexity, needle, python_functions.",
    )
    add_engine_arguments(made)
    made.add_argument(
        "--tasks", required=True, metavar="NAMES", help="names with commas between, such as local"
    )
    made.add_argument(
        "--against",
        type=model_argument,
        metavar="MODEL",
        help="run the same on this model, and compare",
    )
    add_adapter_argument(made, "The tasks run with it, on --against's model too; give one.")
    made.add_argument("--limit", type=count, metavar="N", help="most items of a task")
    made.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each item; default the task's"
    )
    made.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    made.add_argument(
        "--allow-code",
        action="store_true",
        help="run what the model has written, in a process with limits, where a task does that",
    )
    made.add_argument(
        "--batch-size", type=count, default=BATCH, metavar="N", help=f"default {BATCH}"
    )
    made.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    add_quiet(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and write them where that is asked for."""
    own = parser()
    arguments = own.parse_args(argv)
    if len(arguments.adapter) > 1:
        own.error("--adapter: tasks run with one adapter at a time; give one")
    require_extra()
    if arguments.against is not None:
        locate_model(arguments.against)  # that it is not there is said before an hour of tasks
    metrics = _figures(arguments.checkpoint, arguments)
    against = None if arguments.against is None else _figures(arguments.against, arguments)
    print(format_table(_rows(metrics, against)))
    if arguments.output is not None:
        models = [("checkpoint", metrics), *([("against", against)] if against else [])]
        measured = {name: [m.model_dump(mode="json") for m in found] for name, found in models}
        replace_file(arguments.output, (json.dumps(measured, indent=1) + "\n").encode())
        print(f"figures: {typed_path(arguments.output)}")
    return 0


def require_extra() -> None:
    """Refuse to start where lm-eval is not installed.

    Raises:
        RequestError: it is not.
    """
    if find_spec("lm_eval") is None:
        raise RequestError(
            "ptq eval needs lm-eval, which is not installed; install it with "
            "`pip install 'ptq[eval]'`"
        )


def _figures(folder: Path, arguments: argparse.Namespace) -> list[Metric]:
    """What a model makes of the tasks."""
    names = [name for name in arguments.tasks.split(",") if name]
    if not names:
        raise RequestError("--tasks: names none; give local, or names of tasks", "tasks")
    return evaluation.evaluate(
        open_engine(folder, arguments, arguments.batch_size, read_adapters(arguments)),
        names,
        adapter=next(iter(arguments.adapter), None),
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        chat=arguments.chat,
        allow_code=arguments.allow_code,
        progress=not arguments.quiet,
    )


def _rows(metrics: Sequence[Metric], against: Sequence[Metric] | None) -> list[tuple[str, ...]]:
    """The table's rows, the header first."""
    if against is None:
        return [figures.HEADER, *map(figures.cells, metrics)]
    rows = figures.compared(metrics, against)
    both = [figures.cells(row.quantized, row) for row in rows]
    return [(*figures.HEADER, *figures.AGAINST), *both]
