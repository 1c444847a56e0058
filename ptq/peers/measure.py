"""Runs peers one after the other and compares what they predict with the original.

A peer is given the same calibration tokens as our own run, and judged on the same evaluation tokens
by the same definitions (`inference.accuracy`). Its quantized model runs in transformers, in fp32
beside what it quantizes; the original runs in this project's engine. What a peer does not manage is
the reason in its row, and no error of ours.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from calibrate.data import TokenSet
from formats.errors import EngineError
from formats.scheme import Strict
from inference.accuracy import Accuracy, Scorer, compare
from inference.bench.peers.interpreter import installed
from ptq.peers.process import PeerProcess, interpreter
from ptq.peers.specs import PeerSpec
from ptq.plan.plan import ModelSummary
from ptq.recipe.schema import Recipe
from ptq.result import CalibrationSummary

LOGS, PEERS_FILE = "peers", "peers.json"  # below the output path
SAME_KL = 1e-8  # nats; two implementations of one float model differ by less


class PeerRow(Strict):
    """What one peer made of the model.

    Attributes:
        name: Of the catalogue.
        method: What it does, in a few words.
        package: Its distribution.
        version: Of that; None where it is not installed.
        threads: Threads that it was allowed.
        seconds: Wall time of its quantization alone, without loading the model, unless it
            quantizes while it loads.
        peak_rss_bytes: Largest resident memory of its process up to the end of the quantization.
        accuracy: Against the original; None where it failed.
        error: Why it failed.
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
    """What `peers.json` holds.

    Attributes:
        model: The original.
        calibration: The tokens that the peers were given.
        evaluation: The tokens that they were compared on.
        environment: Processor, threads and versions of the measurement.
        peers: What they made of the model.
    """

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
    """Measure the peers of a recipe; what they print lies in `peers/` below its output path.

    Args:
        recipe: Its report says which peers.
        original: The model that they are compared with.
        calibration: Tokens that they may calibrate on.
        evaluation: Tokens that they are compared on.
        progress: Show a progress bar.
    """
    logs = recipe.output.path / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    rows = []
    bar = tqdm(recipe.report.peers, desc="Other tools", unit="tool", disable=not progress)
    for spec in bar:
        bar.set_postfix_str(spec.name)
        with tempfile.TemporaryDirectory(prefix="ptq-peer-") as folder:
            _write_job(Path(folder), recipe, spec, calibration, evaluation)
            process = PeerProcess(
                spec, Path(folder), logs / f"{spec.name}.log", cpu_only=recipe.device == "cpu"
            )
            rows.append(_measure(spec, process, original, evaluation.sequences()))
    return tuple(rows)


def _write_job(
    folder: Path, recipe: Recipe, spec: PeerSpec, calibration: TokenSet, evaluation: TokenSet
) -> None:
    tensors = {}
    for name, tokens in (("calibration", calibration), ("evaluation", evaluation)):
        tensors |= {name: tokens.ids.contiguous(), f"{name}_mask": tokens.mask.contiguous()}
    save_file(tensors, folder / "tokens.safetensors")
    (folder / "scratch").mkdir()
    job = {
        "model": str(recipe.model.path.resolve()),
        "adapter": str(spec.peer.adapter),
        "options": dict(spec.peer.options),
        "threads": torch.get_num_threads(),
    }
    (folder / "job.json").write_text(json.dumps(job))


def _measure(
    spec: PeerSpec, process: PeerProcess, original: Scorer, sequences: Sequence[torch.Tensor]
) -> PeerRow:
    peer, version = spec.peer, None
    found: dict[str, object] = {}
    try:
        version = installed(interpreter(spec), [peer.package])[peer.package]
        with process:
            found |= dict(process.quantized())
            accuracy = compare(original, process, sequences)
        if accuracy.kl_mean < SAME_KL:
            raise EngineError("its logits are those of the original: it quantized nothing")
        found["accuracy"] = accuracy
    except EngineError as error:
        found["error"] = without_folders(str(error))
    return PeerRow(
        name=spec.name,
        method=peer.method,
        package=peer.package,
        version=version,
        threads=torch.get_num_threads(),
        **found,  # pyright: ignore[reportArgumentType]
    )


def without_folders(text: str) -> str:
    """Text with absolute paths cut to their last name: reports do not tell where things lie."""
    return re.sub(r"(?<![\w./])/(?:[^\s/'\":]+/)+", "", text)
