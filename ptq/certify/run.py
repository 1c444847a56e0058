"""One certificate, made or verified."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from formats.errors import CheckpointError, RequestError
from formats.files import sha256_file
from formats.gguf.locate import locate_model
from formats.stored.folder import CERTIFICATE, CONFIG
from ptq.certify import measuring
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
from ptq.certify.page import render
from ptq.certify.setting import LevelName
from ptq.output import CHECKPOINT_FOLDER


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
        folder: The checkpoint.
        against: The original: a folder, or `organization/model` on the hub.
        level: How much is measured.
        prompts: Text or chats in the place of our own text.
        seed: Of all that is drawn.
        device: Where both run; `auto` is a GPU where there is one.
        progress: Show progress bars.

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
    setting = measuring.open_setting(folders, level, seed, prompts, device)
    pair = measuring.open_pair(folders, setting, device)
    rows = measuring.measure(pair, setting, progress=progress)
    made = made_now(folders, (str(against), prompts), (level, seed, device), since)
    found = certificate_of(rows, made, kl_limit(folder))
    named = folder.absolute()
    title = named.parent.name if named.name == CHECKPOINT_FOLDER else named.name
    write_certificate(folder, found, render(found, title))
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
        folder: The checkpoint.
        against: The original, where it is not where it was.
        prompts: Likewise.
        seed: Of the sample.
        progress: Show progress bars.

    Returns:
        How many cases were measured, and a sentence on each difference; each names its figure.

    Raises:
        CheckpointError: there is no certificate, or the original is another model.
        RequestError: the prompts are others.
    """
    found = read_certificate(folder)
    if found is None:
        raise CheckpointError(
            f"{folder}: found no {CERTIFICATE}; make it with `ptq certify {folder} --against MODEL`"
        )
    made = found.made
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
    setting = measuring.open_setting(folders, made.level, made.seed, prompts, made.device)
    pair = measuring.open_pair(folders, setting, made.device)
    numbers = measuring.sample(found.rows, seed)
    again = measuring.measure_again(pair, setting, numbers, progress=progress)
    count = sum(map(len, numbers.values()))
    return count, list(differences(found.rows, numbers, again))
