"""`ptq check`: holds a recipe against its model and its data, and shows what a run would do.

Nothing is written and no weight is read; it takes seconds on a model of any size.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from calibrate.data import TokenSet
from formats.checkpoint.read import Checkpoint
from formats.families.experts import EXPERT
from formats.memory import rss_bytes
from ptq.plan.cost import predict_seconds
from ptq.plan.plan import Plan, build_plan
from ptq.plan.preflight import is_taken, read_data
from ptq.plan.speed import measure_speed
from ptq.recipe.schema import LoadedRecipe, read_recipe

PHASES = 4  # that are named, the longest


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of all commands that take a recipe."""
    parser.add_argument("recipe", type=Path, help="recipe in YAML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, such as dataset.calibration.samples=128; may be repeated",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="overrides output.path")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """What the arguments of `add_recipe_arguments` override in the recipe."""
    output = arguments.output
    return [
        *arguments.set,
        *([] if output is None else [f"output.path={json.dumps(str(output))}"]),
    ]


def prepare(loaded: LoadedRecipe, *, force: bool) -> tuple[Plan, dict[str, TokenSet]]:
    """Open a recipe's model, plan the run, and read its data by split.

    Raises:
        RecipeError: the recipe does not fit the model, or its data cannot be used.
        CheckpointError: the model's files are damaged.
    """
    checkpoint = Checkpoint.open(loaded.recipe.model.path)
    plan = build_plan(loaded.recipe, checkpoint, loaded.where, force=force)
    return plan, read_data(loaded.recipe)


def main(argv: Sequence[str] | None = None) -> int:
    """Check a recipe and print its plan; 0 where it would run."""
    parser = argparse.ArgumentParser(prog="ptq check", description=(__doc__ or "").split("\n\n")[0])
    add_recipe_arguments(parser)
    arguments = parser.parse_args(argv)
    plan, data = prepare(read_recipe(arguments.recipe, overrides_of(arguments)), force=True)
    print("\n".join(describe_plan(plan, data)))
    return 0


def describe_plan(plan: Plan, data: Mapping[str, TokenSet]) -> Iterator[str]:
    """What a run would do, line by line."""
    recipe, model, scheme = plan.recipe, plan.model, plan.recipe.scheme
    yield (
        f"model        {recipe.model.path}: {model.model_type}, {model.blocks} blocks, "
        f"{model.parameters / 1e6:.1f} M parameters, {model.dtype}, {_size(model.nbytes)}"
    )
    yield f"scheme       {scheme.wac}{_other_layers(plan)}"
    for row in group_modules(plan):
        yield f"  {row}"
    if scheme.kv_cache is not None:
        kv = scheme.kv_cache
        yield (
            f"  K and V of {model.blocks} blocks: {kv.dtype} {kv.granularity}, "
            f"{'dynamic' if kv.dynamic else 'static'}"
        )
    yield f"methods      {', '.join(method.name for method in recipe.methods) or 'none'}"
    yield from (f"  {transform}" for transform in plan.transforms)
    if plan.smoothing:
        yield f"  smoothed inputs: {', '.join(dict.fromkeys(g.kind for g in plan.smoothing))}"
    for split, tokens in data.items():
        yield (
            f"{split:<13}{tokens.source}: {len(tokens.ids)} sequences, {tokens.tokens} tokens, "
            f"fingerprint {tokens.fingerprint[:12]}"
        )
    yield from describe_prediction(plan)
    taken = " (exists: run with --force)" if is_taken(recipe.output.path) else ""
    yield f"output       {recipe.output.path}{taken}"


def describe_prediction(plan: Plan) -> Iterator[str]:
    """What a run would take: room, memory, and time on this machine as it is now."""
    predicted, process = plan.prediction, rss_bytes()
    host = _size(process + predicted.memory_bytes)
    memory = f"memory about {host}, {_size(process)} of it the process itself"
    if predicted.device_bytes:
        memory += f"; GPU memory about {_size(predicted.device_bytes)}"
    yield (
        f"predicted    checkpoint {_size(predicted.checkpoint_bytes)} (original "
        f"{_size(plan.model.nbytes)}), on the disk about {_size(predicted.disk_bytes)} at most"
    )
    yield f"  {memory}"
    device = torch.device("cuda" if predicted.device_bytes else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        yield "  time unknown: the recipe asks for a GPU, and there is none here"
        return
    seconds = predict_seconds(predicted.work, measure_speed(device))
    total = seconds.pop("total")
    longest = sorted(seconds, key=lambda phase: -seconds[phase])[:PHASES]
    parts = ", ".join(f"{phase} {duration_text(seconds[phase])}" for phase in longest)
    yield f"  quantization about {duration_text(total)} ({parts}), data and report aside"


def duration_text(seconds: float) -> str:
    """A time for a person, such as `12 s`, `3 min` or `1.5 h`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _other_layers(plan: Plan) -> str:
    """How many layers have a scheme of their own, if any."""
    main = plan.recipe.scheme.of_layers
    count = sum(scheme != main for scheme in plan.schemes.values())
    return f", but for {count} of {len(plan.quantized)} quantized layers" if count else ""


def group_modules(plan: Plan) -> Iterator[str]:
    """Linear layers with the same fate in one row, whatever their block and their expert."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in plan.modules:
        name = re.sub(r"\.\d+(?=\.)", ".*", module.name)
        shape = "x".join(map(str, module.shape))
        groups.setdefault((name, shape, module.action, module.reason), []).append(module.name)
    width = max(len(name) for name, *_ in groups)
    for (name, shape, action, reason), names in groups.items():
        blocks = _indices(r"\.layers\.(\d+)\.", names, "blocks")
        experts = _indices(EXPERT, names, ", experts")
        where = f"{blocks}{experts}"
        yield f"{name:<{width}}  {shape:>11}  {where:<14}  {action:<8}  {reason}".rstrip()


def _indices(pattern: str | re.Pattern[str], names: Iterable[str], title: str) -> str:
    """Which blocks or experts layers belong to; empty for those that belong to none."""
    found = {int(match[1]) for match in (re.search(pattern, name) for name in names) if match}
    return f"{title} {_ranges(sorted(found))}" if found else ""


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges, such as `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.2f} GB"
