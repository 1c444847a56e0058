"""What a run may take from an earlier one: what must be equal for it, and what must have been kept.

A run goes on where all is equal that decides on the bytes of a checkpoint. These are what the
recipe and the model made of each other (the plan), the tokens, the model's files, torch's version,
the device, and the code that calibrates, solves and writes. What checks a recipe, shows progress or
makes a report decides nothing.

A recipe is solved from an earlier run's statistics where that kept all that it needs; where it did
not, the message says what to do.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from calibrate.spec import SINK_INPUT
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.files import sha256_file
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.pipeline.artifact import FISHER_FOLDER, HESSIANS_FOLDER, Artifact, moments_file
from ptq.plan.plan import Plan
from ptq.plan.schedule import KEPT_MOMENTS, Schedule
from ptq.recipe.schema import Recipe
from ptq.text import size_text, typed_path

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
    sinks = f"{plan.recipe.sinks.model_dump_json()} by values: {plan.sinks_by_values}"
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


def check_solvable(artifact: Artifact, plan: Plan) -> None:
    """Refuse what cannot be solved from what a run kept.

    Raises:
        RecipeError: tells everything that stands in the way.
    """
    problems = list(_obstacles(artifact, plan.recipe, plan.blocks[0]))
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise RecipeError(
            f"{typed_path(artifact.folder)}: cannot be solved from its statistics:{lines}"
        )


def solve_notes(artifact: Artifact, recipe: Recipe) -> Iterator[str]:
    """What a person should know of where the factors, ranges and schemes of a solve come from."""
    differ = artifact.found.differing(recipe)
    own, before = recipe.scheme.of_layers.model_dump(mode="json"), artifact.found.settings["scheme"]
    if recipe.layers and "layers" not in differ and any(before[key] != own[key] for key in own):
        texts = "; ".join(dict.fromkeys(entry.scheme.text for entry in recipe.layers))
        yield (
            f"layers: those that it names keep what they had in that run ({texts}); add "
            "--set 'layers=[]' for one scheme in all"
        )
    for name in artifact.found.recalled(recipe):
        other = f", searched for its own {' and '.join(differ)}" if differ else ""
        yield f"{name}: as that run found it{other}"


def _obstacles(artifact: Artifact, recipe: Recipe, block: str) -> Iterator[str]:
    record, statistics = artifact.record, artifact.statistics
    now = seen_key(recipe, Checkpoint.open(recipe.model.folder))
    if record.model_key.partition(" ")[0] != now.partition(" ")[0]:
        yield f"{recipe.model.path} is not the model that they were taken from"
    elif record.model_key != now:
        yield "its methods rotate the model otherwise than that run's; give it the same `rotation`"
    methods = block_methods(recipe.methods)
    schedule = Schedule(recipe, [method for _, method in methods])
    ordinary = {key: stats for key, stats in statistics.items() if SINK_INPUT not in key[1]}
    seen = {stats.tokens for stats in ordinary.values()}
    wanted = record.calibration.tokens - record.sink_tokens * record.calibration.sequences
    both = {wanted, record.calibration.tokens}  # the head's statistics hold sink tokens, too
    if schedule.needs_data and (not seen or not seen <= both):
        yield (
            f"its scheme needed no data: {max(seen, default=0)} of {wanted} "
            "tokens were observed. Run it with --set statistics.histograms=true"
        )
    recalled = artifact.found.recalled(recipe)
    for spec, method in methods:
        if method.needs == "samples" and spec.name not in recalled:
            yield f"{spec.name} {_needs_samples(spec, method, artifact, recipe)}"
    keys = [s for (_, role), s in statistics.items() if role == "k_cache"]
    for field, sums, what in (
        ("center_keys", "channel_sum", "the means of K"),
        ("compensate_keys", "query_moments", "the second moments of queries"),
    ):
        wanted = any(getattr(cache, field) for cache in recipe.quantized_caches)
        if wanted and any(getattr(stats, sums) is None for stats in keys):
            yield (
                f"{field} takes {what}, which a run keeps whose own cache has it. Run the recipe, "
                f"or set {field}: false for its caches"
            )
    yield from _unseen(artifact, recipe, schedule, block)
    stage = _stage(recipe, schedule, len(methods))
    roles = ((role, stats) for (_, role), stats in statistics.at(stage).items())
    counted = all(stats.counted for role, stats in roles if role != SINK_INPUT)
    if recipe.static and not schedule.by_maxima and not counted:
        observers = recipe.observers
        yield (
            f"the observers {observers.input.method} and {observers.kv_cache.method} need "
            "histograms, which that run did not keep. Run it with --set statistics.histograms=true"
        )


def _needs_samples(spec: MethodSpec, method: Method, artifact: Artifact, recipe: Recipe) -> str:
    """Why a method cannot take what the run found, and what to do."""
    fix = _without_samples(spec, artifact, recipe)
    begin, found = "runs samples through the model", artifact.found
    before = found.options(spec.name)
    if method.keeps == "nothing" or before is None:
        return f"{begin}; {fix}"
    mine = spec.model_dump(mode="json")
    other = [f"{key}: {before[key]}" for key in mine if mine[key] != before[key]]
    if other:
        begin = f"{begin}, as its options are not those of that run"
        return f"{begin}; give it {', '.join(other)}, or {fix}"
    if not found.same_methods(recipe, 1 + [m.name for m in recipe.methods].index(spec.name)):
        return f"{begin}, as the methods before it are not those of that run; {fix}"
    differ = " and ".join(found.differing(recipe))
    return f"{begin}, as the ranges that it found hold for that run's {differ} only; {fix}"


def _without_samples(spec: MethodSpec, artifact: Artifact, recipe: Recipe) -> str:
    """How a recipe does without the samples of a method; as it did with them, if it did."""
    rows = (row for row in artifact.record.smoothing if row.method == spec.name)
    way = spec.without_samples([row.alpha for row in rows if row.alpha is not None])
    if way is None:
        others = [
            {other.name: other.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)}
            for other in recipe.methods
            if other != spec
        ]
        typed = shlex.quote(f"methods={json.dumps(others)}")
        return f"leave it out with --set {typed}, or run the recipe"
    advice, option = way
    index = [method.name for method in recipe.methods].index(spec.name)
    return f"{advice}, such as --set methods.{index}.{spec.name}.{option}"


def _stage(recipe: Recipe, schedule: Schedule, count: int) -> str:
    """The method after which the samples last ran, of the first `count`; '' for none."""
    names = [spec.name for spec, _ in block_methods(recipe.methods)]
    return next((names[i - 1] for i in reversed(schedule.passes) if i <= count), "")


def _unseen(artifact: Artifact, recipe: Recipe, schedule: Schedule, block: str) -> Iterator[str]:
    """Passes of the samples, and second moments, that the run did not keep."""
    order = [spec.name for spec in recipe.methods]
    for i in schedule.passes:
        stage = _stage(recipe, schedule, i)
        same = artifact.found.same_methods(recipe, order.index(stage) + 1)
        kept = same and len(artifact.statistics.at(stage)) > 0
        if schedule.methods[i - 1].rescales and not kept:
            advice = f"use the observer absmax, or leave {stage} out"
            yield f"after {stage} only maxima are known; {advice}"
    for i, (spec, method) in enumerate(block_methods(recipe.methods)):
        name = moments_file(block, _stage(recipe, schedule, i))
        for wanted, folder, what, key in (
            (method.moments != "none", HESSIANS_FOLDER, "second moments", "hessians"),
            (method.gradients, FISHER_FOLDER, "gradients", "gradients"),
        ):
            if wanted and not (artifact.folder / folder / name).is_file():
                most = size_text(KEPT_MOMENTS)
                yield (
                    f"{spec.name} needs {what}, which that run did not keep: a run keeps those "
                    f"that its methods use where they take at most {most}. Run it with --set "
                    f"statistics.{key}=true"
                )
