"""What decides on the bytes of a checkpoint, in one number: where it is equal, a run goes on.

These are what the recipe and the model made of each other (the plan), the tokens, the model's
files, torch's version, the device, and the code that calibrates, solves and writes. What checks a
recipe, shows progress or makes a report decides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from formats.files import sha256_file
from ptq.methods.common.float_model import FloatModel
from ptq.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
DECIDING = (  # folders and files of our code
    "calibrate",
    "formats",
    "kernels/numerics.py",
    "kernels/two_level.py",
    "ptq/methods",
    "ptq/pipeline",
    "ptq/plan/schedule.py",
    "ptq/plan/shapes.py",
)
SHOWING = ("ptq/pipeline/live.py", "ptq/pipeline/timing.py")  # beside those that decide


def run_key(
    plan: Plan, model: FloatModel, fingerprint: str, device: torch.device | None = None
) -> str:
    """SHA-256 of all that decides; see the module's docstring.

    Args:
        plan: Of the run; its output and its report decide nothing.
        model: The checkpoint that is quantized, or its view.
        fingerprint: Of the calibration tokens.
        device: Where blocks are solved; the CPU by default.
    """
    where = device or torch.device("cpu")
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{threads} threads"
    digest = hashlib.sha256(plan.recipe.model_dump_json(exclude={"output", "report"}).encode())
    digest.update(plan.model_dump_json(include={"modules", "smoothing"}).encode())
    digest.update(f"{fingerprint} torch {torch.__version__} {name}\n".encode())
    digest.update(model_key(model).encode())
    digest.update(code_key().encode())
    return digest.hexdigest()


def code_key(root: Path = ROOT) -> str:
    """SHA-256 of the code that decides, below a folder that holds our packages."""
    digest = hashlib.sha256()
    for path in deciding_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def deciding_files(root: Path = ROOT) -> Iterator[Path]:
    """Sources of the code that decides, below a folder that holds our packages."""
    for part in DECIDING:
        path = root / part
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        yield from (file for file in files if file.relative_to(root).as_posix() not in SHOWING)


def model_key(model: FloatModel) -> str:
    """SHA-256 of a model's files: names, sizes and times of change, the whole of small ones."""
    digest = hashlib.sha256()
    for path in sorted(model.path.iterdir()):
        if path.is_file():
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
            digest.update(sha256_file(path).encode() if about.st_size < 1 << 24 else b"")
    return digest.hexdigest()
