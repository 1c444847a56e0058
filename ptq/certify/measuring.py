"""Runs all parts of a certificate on both models, or, to verify one, a sample of its cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import RequestError
from formats.namespace import later
from formats.tokenizer import load_tokenizer
from inference.backend import choose_backend
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from inference.transformers_code.choose import read_shape
from ptq.certify.answering import answer_cases, measure_answers
from ptq.certify.context import context_cases, measure_contexts
from ptq.certify.divergence import measure_text, text_cases
from ptq.certify.figures import TASKS, Row
from ptq.certify.objects import measure_objects, object_cases
from ptq.certify.setting import LEVELS, LevelName, Pair, Setting, read_texts

with later():
    from ptq.evaluate import evaluation  # lm-eval, which only tasks need

PLACES, STEP = 16, 1024  # requests that run at once; tokens of a step, whose logits are held
Rows = dict[str, list[list[Row]]]  # of each part, of each of its cases


@dataclass(frozen=True)
class Part:
    """One part of the measurement.

    Attributes:
        title: For the progress bar.
        cases: What is asked; follows from the setting.
        measure: Gives each case's rows. A case's rows do not depend on the others.
        steps: How often the bar is moved on by a case.
    """

    title: str
    cases: Callable[[Setting], Sequence[Any]]
    measure: Callable[[Pair, Sequence[Any], Any], list[list[Row]]]
    steps: int


def task_cases(setting: Setting) -> list[tuple[str, int]]:
    """Standard tasks that need no network, with how many items of each, where lm-eval is there."""
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


PARTS: Mapping[str, Part] = {
    "text": Part("Comparing text", text_cases, measure_text, 1),
    "answers": Part("Answering", answer_cases, measure_answers, 3),
    "objects": Part("Writing JSON", object_cases, measure_objects, 4),
    "contexts": Part("Searching contexts", context_cases, measure_contexts, 66),
    "tasks": Part("Standard tasks", task_cases, measure_tasks, 2),
}


def open_setting(
    folders: tuple[Path, Path], level: LevelName, seed: int, prompts: Path | None, device: str
) -> Setting:
    """The setting of a certificate, before any weight is read.

    Args:
        folders: Of the original and of the checkpoint.
        level: How much is measured.
        seed: Of all that is drawn.
        prompts: Text in the place of our own; None for that.
        device: Where both will run.

    Raises:
        CheckpointError: a folder is damaged.
        RecipeError: the prompts cannot be read.
        RequestError: the models are of different vocabularies.
    """
    shapes = []
    for folder in folders:
        checkpoint = Checkpoint.open(folder)
        shapes.append(read_shape(checkpoint, choose_backend(device, checkpoint)))
    if shapes[0].vocab_size != shapes[1].vocab_size:
        raise RequestError(
            f"--against: the original has a vocabulary of {shapes[0].vocab_size} tokens and the "
            f"checkpoint one of {shapes[1].vocab_size}; give the model it was made from"
        )
    tokenizer = load_tokenizer(folders[1])
    length = min(LEVELS[level].longest, *(shape.max_positions for shape in shapes))
    texts = read_texts(prompts, tokenizer)
    return Setting(LEVELS[level], seed, texts, tokenizer, length)


def open_pair(
    folders: tuple[Path, Path], setting: Setting, device: str, places: int = PLACES
) -> Pair:
    """Both engines: alike in all but the model, with equal bits whatever runs beside a request."""
    config = EngineConfig(
        max_batch_size=places,
        max_batched_tokens=STEP,
        max_model_len=setting.length,
        kv_blocks=max(2 * blocks_for(setting.length), places * blocks_for(512)),
        invariant=True,
    )
    return Pair(*(Engine.from_pretrained(f, config=config, device=device) for f in folders))


def measure(pair: Pair, setting: Setting, *, progress: bool = True) -> Rows:
    """Rows of all parts.

    Raises:
        EngineError: a model gives NaN or infinity.
    """
    return {name: _run(pair, part, part.cases(setting), progress) for name, part in PARTS.items()}


def measure_again(
    pair: Pair, setting: Setting, names: Mapping[str, Sequence[int]], *, progress: bool = True
) -> Rows:
    """Rows of the cases of each part that numbers name, in their order."""
    found: Rows = {}
    for name, numbers in names.items():
        cases = PARTS[name].cases(setting)
        found[name] = _run(pair, PARTS[name], [cases[i] for i in numbers], progress)
    return found


def sample(rows: Rows, seed: int, most: int = 3) -> dict[str, list[int]]:
    """Numbers of some cases of each part."""
    draw = random.Random(f"{seed} sample")
    return {
        name: sorted(draw.sample(range(len(own)), min(most, len(own))))
        for name, own in rows.items()
    }


def _run(pair: Pair, part: Part, cases: Sequence[Any], progress: bool) -> list[list[Row]]:
    total = part.steps * len(cases)
    with bar(title=part.title, unit="step", total=total, shown=progress) as shown:
        return part.measure(pair, cases, shown)
