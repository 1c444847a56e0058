"""One certificate, made or verified: all parts of it on both models, or a sample of their cases."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.errors import CheckpointError, NoFixedOrderError, RequestError, typed
from formats.files import sha256_file
from formats.gguf.locate import locate_model
from formats.namespace import later
from formats.stored.folder import CERTIFICATE, CONFIG
from formats.tokenizer import load_tokenizer
from inference.backend import choose_backend
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from inference.transformers_code.model import read_shape
from ptq.certify.answering import answer_cases, measure_answers, measure_objects, object_cases
from ptq.certify.certificate import (
    Certificate,
    certificate_of,
    differences,
    kl_limit,
    made_now,
    other_files,
    read_certificate,
    write_certificate,
)
from ptq.certify.figures import TASKS, Row, Rows
from ptq.certify.page import render
from ptq.certify.setting import LEVELS, LevelName, Pair, Setting, read_texts
from ptq.certify.texts import context_cases, measure_contexts, measure_text, text_cases
from ptq.output import title_of
from ptq.report.known import rounding_noise

with later():
    from ptq.evaluate import evaluation  # lm-eval, which only tasks need

log = logging.getLogger("ptq.certify")
PLACES, STEP = 16, 1024  # requests that run at once; tokens of a step, whose logits are held


@dataclass(frozen=True)
class Part:
    """One part of the measurement.

    Attributes:
        cases: What is asked; follows from the setting.
        measure: Gives each case's rows. A case's rows do not depend on the others.
        steps: How often the bar is moved on by a case; some answers do it more often.
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
        prompts: Text in the place of our own; None for that.

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
    return Setting(LEVELS[level], seed, *read_texts(prompts, tokenizer), tokenizer, length)


def open_pair(
    folders: tuple[Path, Path], setting: Setting, device: str, places: int = PLACES
) -> Pair:
    """Both engines: alike in all but the model, with equal bits whatever runs beside a request,
    where a device has that for both."""
    config = EngineConfig(
        max_batch_size=places,
        max_batched_tokens=STEP,
        max_model_len=setting.length,
        kv_blocks=max(2 * blocks_for(setting.length), places * blocks_for(512)),
        invariant=True,
    )
    try:
        return Pair(*(Engine.from_pretrained(f, config=config, device=device) for f in folders))
    except NoFixedOrderError as refused:
        log.warning("%s. It is left out: `--verify` cannot compare digits", refused)
    config = config.model_copy(update={"invariant": False})
    return Pair(*(Engine.from_pretrained(f, config=config, device=device) for f in folders))


def measure(
    pair: Pair,
    setting: Setting,
    numbers: Mapping[str, Sequence[int]] | None = None,
    *,
    progress: bool = True,
) -> Rows:
    """Rows of all cases of all parts.

    Args:
        numbers: Of some cases, by part: those alone, in their order.

    Raises:
        EngineError: a model gives NaN or infinity.
    """
    found: Rows = {}
    for name in PARTS if numbers is None else numbers:
        part = PARTS[name]
        cases = part.cases(setting)
        if numbers is not None:
            cases = [cases[i] for i in numbers[name]]
        total = part.steps * len(cases)
        with bar(title=part.title, unit="step", total=total, shown=progress) as shown:
            found[name] = part.measure(pair, cases, shown)
    return found


def sample(rows: Rows, seed: int, most: int = 3) -> dict[str, list[int]]:
    """Numbers of some cases of each part."""
    draw = random.Random(f"{seed} sample")
    return {
        name: sorted(draw.sample(range(len(own)), min(most, len(own))))
        for name, own in rows.items()
    }


def certify(
    folder: Path,
    against: Path,
    *,
    level: LevelName = "quick",
    prompts: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
) -> Certificate:
    """Measure a checkpoint against its original, and write its certificate into it.

    Args:
        against: The original: a folder, or `organization/model` on the hub.
        prompts: Text or chats in the place of our own text.
        device: Where both run; `auto` is a GPU where there is one.

    Raises:
        CheckpointError: a model is damaged, or the certificate cannot be written.
        RecipeError: the prompts cannot be read.
        RequestError: the models are of different vocabularies.
        EngineError: a model gives NaN or infinity.
    """
    since = time.monotonic(), time.process_time()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folders = locate_model(against), folder
    setting = open_setting(folders, level, seed, prompts, device)
    pair = open_pair(folders, setting, device)
    rows = measure(pair, setting, progress=progress)
    given = {"against": str(against), "level": level, "seed": seed, "device": device}
    made = made_now(folders, prompts, since, invariant=pair.quantized.config.invariant, **given)
    noise = rounding_noise(device, pair.original.checkpoint.config)
    found = certificate_of(rows, made, kl_limit(folder, noise))
    write_certificate(folder, found, render(found, title_of(folder)))
    return found


def verify(
    folder: Path,
    *,
    against: Path | None = None,
    prompts: Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> tuple[int, list[str]]:
    """Measure a sample of a checkpoint's certificate again.

    Args:
        against: The original, where it is not where it was.
        prompts: Likewise.

    Returns:
        How many cases were measured, and a sentence on each difference; each names its figure.

    Raises:
        CheckpointError: there is no certificate, or the original is another model.
        RequestError: the prompts are others, or the device gives no digits twice.
    """
    found = read_certificate(folder)
    if found is None:
        raise CheckpointError(
            f"{folder}: found no {CERTIFICATE}; make it with "
            f"{typed('certify', folder, '--against', 'MODEL')}"
        )
    made = found.made
    if not made.invariant:
        raise RequestError(
            f"--verify: on {made.device} this model's sums have no fixed order, and digits differ "
            "from run to run; certify it with `--device cpu`, where they do not"
        )
    others = other_files(folder, found)
    if others:
        return 0, [f"the weights: {', '.join(others)} changed since they were certified"]
    original = locate_model(against or Path(made.against))
    if sha256_file(original / CONFIG) != made.against_config:
        raise CheckpointError(
            f"{original}: its {CONFIG} is not that of the original that was compared; give that "
            "with --against"
        )
    prompts = prompts or (None if made.prompts is None else Path(made.prompts))
    if prompts is not None and sha256_file(prompts) != made.prompts_sha256:
        raise RequestError(f"--prompts: {prompts} is not the file of the certificate; give that")
    folders = original, folder
    setting = open_setting(folders, made.level, made.seed, prompts, made.device)
    pair = open_pair(folders, setting, made.device)
    numbers = sample(found.rows, seed)
    again = measure(pair, setting, numbers, progress=progress)
    count = sum(map(len, numbers.values()))
    return count, list(differences(found.rows, numbers, again))
