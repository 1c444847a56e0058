"""What decides on the bytes of a checkpoint: where all of it is equal, a run goes on.

These are what the recipe and the model made of each other (the plan), the tokens, the model's
files, torch's version, the device, and the code that calibrates, solves and writes. What checks a
recipe, shows progress or makes a report decides nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from formats.files import sha256_file
from ptq.methods.common.float_model import FloatModel
from ptq.methods.registry import block_methods
from ptq.plan.plan import Plan
from ptq.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
DECIDING = (  # folders and files of our code
    "calibrate",
    "formats",
    "kernels/op_inputs.py",
    "kernels/cpu/build.py",
    "kernels/cpu/csrc/feedback.h",
    "kernels/cpu/native.py",
    "kernels/cpu/structures.py",
    "kernels/feedback.py",
    "kernels/numerics.py",
    "kernels/packed_cache.py",
    "kernels/two_level.py",
    "kernels/triton/calibration",
    "kernels/triton/common.py",
    "kernels/triton/tuning.py",
    "ptq/methods",
    "ptq/pipeline",
    "ptq/plan/modules.py",
    "ptq/plan/schedule.py",
)
RECIPE = "recipe"  # among the facts
SHOWING = tuple(f"ptq/pipeline/{name}.py" for name in ("live", "timing"))  # in them


def key_of(facts: Mapping[str, str]) -> str:
    """One number for what decides, such as `run_facts`: a SHA-256."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def run_facts(
    plan: Plan, model: FloatModel, fingerprint: str, device: torch.device | None = None
) -> dict[str, str]:
    """All that decides, by what a person calls it; see the module's docstring.

    Args:
        plan: Of the run; its output, its report and how many devices there are decide nothing.
        model: The checkpoint that is quantized, or its view.
        fingerprint: Of the calibration tokens.
        device: Where blocks are solved; the CPU by default.
    """
    where = device or torch.device("cpu")
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {threads} threads"
    modules = plan.model_dump_json(include={"modules", "smoothing"})
    return {
        RECIPE: plan.recipe.model_dump_json(exclude={"output", "report", "device"}),
        "the device": name,
        "torch": torch.__version__,
        "the model's files": model_key(model),
        "the calibration data": fingerprint,
        "the code of ptq": code_key(),
        "the plan": hashlib.sha256(modules.encode()).hexdigest(),
    }


def gradients_key(plan: Plan, model: FloatModel, facts: Mapping[str, str]) -> str:
    """One number for what decides on a backward pass: of `run_facts` all but scheme and methods.

    Args:
        model: The model that is quantized, as methods have it seen.
        facts: From `run_facts`.
    """
    kept = {name: fact for name, fact in facts.items() if name not in (RECIPE, "the plan")}
    tokens = plan.recipe.statistics.gradient_tokens
    sinks = plan.recipe.sinks.model_dump_json()
    more = {"seen": seen_key(plan.recipe, model), "tokens": str(tokens), "sinks": sinks}
    return key_of(kept | more)


def seen_key(recipe: Recipe, checkpoint: FloatModel) -> str:
    """Tells the model that calibration saw: its files, and the views it is read through."""
    blocks = [spec for spec, _ in block_methods(recipe.methods)]
    views = [spec.model_dump_json() for spec in recipe.methods if spec not in blocks]
    return " ".join([model_key(checkpoint), *views])


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two runs' facts: a recipe's settings by their keys, and values."""
    lines = []
    old, new = (dict(_settings(json.loads(facts.get(RECIPE, "{}")))) for facts in (before, now))
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            lines.append(f"{key}: {old.get(key, 'none')}, now {new.get(key, 'none')}")
    for name in now:
        if name != RECIPE and before.get(name) != now[name]:
            shown = name in ("the device", "torch")
            lines.append(f"{name}: {before.get(name)}, now {now[name]}" if shown else name)
    return lines[:-1] if len(lines) > 1 and lines[-1] == "the plan" else lines


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """A recipe's settings by their keys, such as `methods.0.smoothquant.alpha`."""
    if isinstance(value, dict):
        named = key.startswith("methods.") and "name" in value
        name = f".{value['name']}" if named else ""
        for part, inner in value.items():
            if not (name and part == "name"):
                yield from _settings(inner, f"{key}{name}.{part}" if key else part)
        if name and len(value) == 1:  # a method without options
            yield f"{key}{name}", "given"
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for i, inner in enumerate(value):
            yield from _settings(inner, f"{key}.{i}")
    else:
        yield key, json.dumps(value).strip('"')


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
