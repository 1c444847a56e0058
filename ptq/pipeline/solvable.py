"""Whether a recipe can be solved from what an earlier run kept, and what to do where it cannot."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from calibrate.spec import SINK_INPUT
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec
from ptq.methods.registry import block_methods
from ptq.pipeline.artifact import FISHER_FOLDER, HESSIANS_FOLDER, Artifact, moments_file
from ptq.pipeline.key import seen_key
from ptq.plan.plan import Plan
from ptq.plan.schedule import KEPT_MOMENTS, Schedule
from ptq.recipe.schema import Recipe
from ptq.text import size_text, typed_path


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
