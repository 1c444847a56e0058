"""Runs peers one after the other and compares what they predict with the original.

A peer is given the same calibration tokens as our own run, and judged on the same evaluation tokens
by the same definitions (`inference.accuracy`). Its quantized model runs in transformers, in fp32
beside what it quantizes; the original runs in this project's engine. What a peer does not manage is
the reason in its row, and no error of ours.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from calibrate.data import TokenSet
from formats.command import bar
from formats.errors import EngineError
from formats.scheme import Strict
from inference.accuracy import Accuracy, Scorer, compare
from inference.bench.peers.process import PeerProcess, installed
from ptq.output import PEER_LOGS
from ptq.plan.plan import ModelSummary
from ptq.recipe.peers import PeerChoice
from ptq.recipe.schema import Recipe
from ptq.result import CalibrationSummary

KIND = Path(__file__).resolve().parent / "quantize_job.py"
SAME_KL = 1e-8  # nats; two implementations of one float model differ by less


class PeerRow(Strict):
    """What one peer made of the model.

    Attributes:
        name: Of the catalogue.
        method: What it does, in a few words.
        version: Of the package; None where it is not installed.
        threads: Threads that it was allowed.
        seconds: Wall time of its quantization alone, without loading the model, unless it
            quantizes while it loads.
        peak_rss_bytes: Largest resident memory of its process up to the end of the quantization.
        accuracy: Against the original; None where it failed.
    """

    name: str
    method: str
    package: str
    version: str | None
    threads: int
    seconds: float | None = None
    peak_rss_bytes: int | None = None
    accuracy: Accuracy | None = None
    error: str | None = None


class PeersRecord(Strict):
    """What `peers.json` holds."""

    model: ModelSummary
    calibration: CalibrationSummary
    evaluation: CalibrationSummary
    environment: dict[str, str | int]
    peers: tuple[PeerRow, ...]


def measure_peers(
    recipe: Recipe,
    original: Scorer,
    calibration: TokenSet,
    evaluation: TokenSet,
    *,
    progress: bool = True,
) -> tuple[PeerRow, ...]:
    """Measure the peers of a recipe; what they print is in `peers/` below its output path."""
    logs = recipe.output.path / PEER_LOGS
    logs.mkdir(parents=True, exist_ok=True)
    rows = []
    tools = bar(recipe.report.peers, title="Other tools", unit="tool", shown=progress)
    for choice in tools:
        tools.set_postfix_str(choice.name)
        with tempfile.TemporaryDirectory(prefix="ptq-peer-") as folder:
            job = _job(Path(folder).resolve(), recipe, choice, calibration, evaluation)
            process = peer_process(choice, job, logs / f"{choice.name}.log", recipe.without_gpu)
            rows.append(_measure(choice, process, original, evaluation.sequences()))
    return tuple(rows)


def _job(
    folder: Path, recipe: Recipe, choice: PeerChoice, calibration: TokenSet, evaluation: TokenSet
) -> dict[str, Any]:
    """What `ptq.peers.quantize_job` is given; its tokens are in a folder."""
    tensors = {}
    for name, tokens in (("calibration", calibration), ("evaluation", evaluation)):
        tensors |= {name: tokens.ids.contiguous(), f"{name}_mask": tokens.mask.contiguous()}
    save_file(tensors, folder / "tokens.safetensors")
    (folder / "scratch").mkdir()
    spec, model = choice.spec, str(recipe.model.folder.resolve())
    job = {"folder": str(folder), "model": model, "threads": torch.get_num_threads()}
    own = {"adapter": str(spec.adapter), "function": spec.function, "options": dict(spec.options)}
    return job | own


def peer_process(choice: PeerChoice, job: dict[str, Any], log: Path, cpu_only: bool) -> PeerProcess:
    """The process of a peer, which is started where its job's files are."""
    settings = {"TOKENIZERS_PARALLELISM": "false"}
    settings |= {"CUDA_VISIBLE_DEVICES": ""} if cpu_only else {}
    where = {"settings": settings, "cwd": Path(job["folder"]), "timeout": choice.timeout}
    return PeerProcess(choice.interpreter, KIND, job, log, **where)


@dataclass(frozen=True)
class SentLogits:
    """The logits that a peer's process sends, as a `Scorer`."""

    process: PeerProcess

    def score(self, ids: Tensor) -> Tensor:
        """Logits fp32 [T, vocabulary] of the next evaluation sequence [T].

        Raises:
            EngineError: the process failed, or what it sent cannot be judged.
        """
        logits = load(self.process.frame())["logits"]
        if len(logits) != len(ids) or not torch.isfinite(logits).all():
            raise EngineError(
                f"its logits {list(logits.shape)} of {len(ids)} tokens are not finite, or too few"
            )
        return logits


def _measure(
    choice: PeerChoice, process: PeerProcess, original: Scorer, sequences: Sequence[Tensor]
) -> PeerRow:
    spec, version = choice.spec, None
    found: dict[str, Any] = {}
    try:
        version = installed(choice.interpreter, [spec.package])[spec.package]
        with process:
            found |= process.answer()  # its seconds and memory
            accuracy = compare(original, SentLogits(process), sequences)
        if accuracy.kl_mean < SAME_KL:
            raise EngineError("its logits are those of the original: it quantized nothing")
        found["accuracy"] = accuracy
    except EngineError as error:
        found["error"] = without_folders(str(error))
    found |= {"method": spec.method, "package": spec.package, "version": version}
    return PeerRow(name=choice.name, threads=torch.get_num_threads(), **found)


def without_folders(text: str) -> str:
    """Text with absolute paths cut to their last name: reports do not say where things are."""
    return re.sub(r"(?<![\w./])/(?:[^\s/'\":]+/)+", "", text)
