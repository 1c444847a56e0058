"""Runs the original and the quantized model and gathers all that the report tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calibrate.data import TokenSet, load_tokens
from calibrate.statistics import Statistics
from formats.cache_scheme import CacheRole
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.modeling.layers import attention_names, block_names
from formats.namespace import later
from formats.tokenizer import load_tokenizer
from inference.accuracy import Accuracy, compare, score_long
from inference.bench.figures import environment, measure_in_turns
from inference.bench.load import Load, run_once
from inference.engine import Engine
from inference.transformers_code.model import CodeModel
from ptq.evaluate import figures
from ptq.evaluate.comparison import compare_on, engine_config, open_both, report_devices
from ptq.evaluate.figures import TaskRow
from ptq.output import STATISTICS_FILE
from ptq.peers.measure import measure_peers
from ptq.plan.plan import Plan
from ptq.recipe.reading import resolved_yaml
from ptq.recipe.schema import AttributionSpec, ReportSpec, SpeedSpec
from ptq.report.attribution import (
    Attribution,
    UnroundedCheckpoint,
    attribute,
    is_the_original,
    references,
)
from ptq.report.data import (
    AlsoMeasured,
    KeptStates,
    KVScales,
    ReportData,
    Sizes,
    SpeedPair,
    check_known,
    check_thresholds,
    failure,
    known_methods,
    provenance_of,
)
from ptq.report.generated import complete, measure_drafts
from ptq.report.inspection import activation_outliers
from ptq.report.known import nearest, rounding_noise
from ptq.result import CalibrationSummary, QuantizationRecord, QuantizationResult, Stopwatch
from ptq.search.search import Ordered

with later():
    from ptq.evaluate import evaluation  # lm-eval, which only tasks need

DRAFTED = 8  # sequences
LONG = 4096  # tokens of a text that shows what a cache loses beyond the evaluation's windows
MOVED = 0.1  # of the whole loss; an unrounded model that differs more is not the original
UNDECLARED = "what each part of a block is follows from a declaration of the model's family"
NOT_THE_SAME = (
    "without any rounding, the checkpoint's model is {0.unrounded:.2g} nats away from the "
    "original, where all of the loss is {0.whole:.2g}, so that no part of it can be measured"
)


def measure(
    result: QuantizationResult,
    plan: Plan,
    evaluation: TokenSet | None = None,
    *,
    ordered: Ordered | None = None,
    progress: bool = True,
) -> ReportData:
    """Run both models and gather the report's data.

    Args:
        plan: What it followed; its recipe says what is measured.
        evaluation: The recipe's evaluation tokens; None reads them.
        ordered: What a search for a budget has found, and measured on them.

    Raises:
        RecipeError: the evaluation text cannot be used.
        CheckpointError: a checkpoint is damaged.
        EngineError: a model gives NaN or infinity.
    """
    recipe, watch = plan.recipe, Stopwatch()
    if evaluation is None:
        tokenizer = load_tokenizer(recipe.model.folder)
        evaluation = load_tokens(recipe.dataset, tokenizer, "evaluation")
    known = None if ordered is None else ordered.accuracy
    measured = _run_both(result, plan, evaluation, watch, known, progress=progress)
    checks = check_thresholds(recipe.report.thresholds, measured["accuracy"])
    text, known = resolved_yaml(recipe), None
    if not checks:
        known = nearest(measured["scheme"], known_methods(text), plan.model)
        config = Checkpoint.open(recipe.model.folder).config
        noise = rounding_noise(report_devices(recipe)[0], config)
        checks = () if known is None else (check_known(known, measured["accuracy"], noise),)
    statistics = result.checkpoint.parent / STATISTICS_FILE
    seconds = watch.seconds()
    seconds.pop("total")
    return ReportData(
        provenance=provenance_of(recipe, result.checkpoint),
        title=f"{recipe.model.path.name} in {measured['scheme']}",
        passed=all(check.holds for check in checks),
        checks=checks,
        failures=tuple(failure(check, known) for check in checks if not check.holds),
        model=plan.model,
        evaluation=CalibrationSummary.of(evaluation),
        quantization=QuantizationRecord(
            **{name: getattr(result, name) for name in QuantizationRecord.model_fields}
        ),
        scale_table=result.scale_table,
        outliers=tuple(activation_outliers(Statistics.load(statistics))),
        environment=environment(report_devices(recipe)[0]),
        seconds=seconds,
        recipe=text,
        known=known,
        budget=None if ordered is None else ordered.record,
        **measured,
    )


def _run_both(
    result: QuantizationResult,
    plan: Plan,
    evaluation: TokenSet,
    watch: Stopwatch,
    known: Accuracy | None,
    *,
    progress: bool,
) -> dict[str, Any]:
    """Those fields of the report's data that the two models give, by name."""
    report, sequences = plan.recipe.report, evaluation.sequences()
    devices = report_devices(plan.recipe)
    far = _long_text(plan, sequences)
    config = engine_config(evaluation, report.speed, 0 if far is None else len(far))
    opened = partial(open_both, (plan.recipe.model.folder, result.checkpoint), config)
    with watch.phase("loading both models"):
        original, quantized = opened(devices[0])

    def load(device: str) -> tuple[Engine, Engine]:
        return (original, quantized) if device == devices[0] else opened(device)

    compared = partial(compare_on, devices, load, progress=progress)
    found: dict[str, Any] = {
        "scheme": _scheme(plan, quantized.checkpoint),
        "sizes": _sizes(original, quantized),
        "kv_scales": _kv_scales(quantized.checkpoint),
    }
    with watch.phase("comparison"):
        found["accuracy"] = known or compared(sequences)
        if evaluation.also is not None:
            accuracy = compared(evaluation.also.sequences())
            text = CalibrationSummary.of(evaluation.also)
            found["also"] = AlsoMeasured(text=text, accuracy=accuracy)
        if far is not None:
            found["further"] = score_long(original, quantized, far, max(map(len, sequences)))
        found["states"] = _kept_states(quantized, sequences)
    with watch.phase("speed"):
        found["speed"] = _measure_speed(original, quantized, report.speed)
    with watch.phase("completions"):
        found["completions"] = complete(original, quantized, spread(sequences, report.completions))
        found["drafts"] = measure_drafts(original, quantized, spread(sequences, DRAFTED))
    if report.tasks:
        with watch.phase("tasks"):
            found["tasks"] = _run_tasks(original, quantized, report, progress=progress)
    if report.peers:
        with watch.phase("other tools"):
            calibration = load_tokens(plan.recipe.dataset, original.tokenizer, "calibration")
            found["peers"] = measure_peers(
                plan.recipe, original, calibration, evaluation, progress=progress
            )
    if report.attribution is not None:
        with watch.phase("attribution"):
            chosen = attributed(sequences, report.attribution)
            expected = references(original, chosen)
            unrounded = original if is_the_original(plan) else None
            del original  # another takes its place in memory
            found["attribution"] = _attribution(
                plan, unrounded, quantized, chosen, expected, progress=progress
            )
    return found


def _scheme(plan: Plan, checkpoint: Checkpoint) -> str:
    """The report's name of it; mixed where the recipe, not a method, gave layers theirs."""
    named = plan.recipe.layers or plan.recipe.budget
    return f"{checkpoint.scheme.wac}{', mixed' if named and checkpoint.own_schemes else ''}"


def _attribution(
    plan: Plan,
    unrounded: Engine | None,
    quantized: Engine,
    sequences: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    progress: bool,
) -> Attribution | str:
    """Where the loss comes from, or why that is not known.

    Args:
        unrounded: The original, where it is in the checkpoint's own terms; else None.
        sequences: Token ids, int64 [T] each.
    """
    if plan.family is None:
        return f"{UNDECLARED}, and none declares {plan.model.model_type!r}"
    try:
        if unrounded is None:
            unrounded = Engine(
                UnroundedCheckpoint.of_run(quantized.checkpoint.path, plan),
                quantized.tokenizer,
                quantized.config,
                quantized.backend,
                quantized_kv=False,
            )
        found = attribute(unrounded, quantized, sequences, expected, progress=progress)
    except (CheckpointError, EngineError) as error:
        return str(error)
    return found if found.unrounded <= MOVED * found.whole else NOT_THE_SAME.format(found)


def spread(sequences: Sequence[Tensor], most: int) -> list[Tensor]:
    """At most so many of some sequences, from the whole of their order."""
    count = min(most, len(sequences))
    return [sequences[i * len(sequences) // count] for i in range(count)]


def long_text(sequences: Sequence[Tensor], longest: int) -> Tensor | None:
    """Half of all tokens, but at most `LONG` and as many as a context has: sequences one after
    another, the token that all begin with once. None where that is hardly longer than one."""
    rest = sequences[1:]
    same = all(ids[0] == sequences[0][0] for ids in rest)
    text = torch.cat([sequences[0], *(ids[same:] for ids in rest)])
    length = min(LONG, longest, len(text) // 2)
    return text[:length] if length >= 2 * max(map(len, sequences)) else None


def _long_text(plan: Plan, sequences: Sequence[Tensor]) -> Tensor | None:
    """`long_text` of a run; None also where the cache is not quantized."""
    if plan.recipe.scheme.kv_cache is None:
        return None
    config = Checkpoint.open(plan.recipe.model.folder).config
    text = config.get("text_config") or config
    return long_text(sequences, text.get("max_position_embeddings") or LONG)


def attributed(sequences: Sequence[Tensor], spec: AttributionSpec) -> list[Tensor]:
    """The starts of some sequences, on which every part of the loss is measured."""
    return [ids[: spec.tokens] for ids in spread(sequences, spec.sequences)]


def _run_tasks(
    original: Engine, quantized: Engine, report: ReportSpec, *, progress: bool
) -> tuple[TaskRow, ...]:
    """The recipe's tasks on both models, each in an engine with room for many requests."""
    before, after = (
        evaluation.evaluate(engine, report.tasks, limit=report.task_items, progress=progress)
        for engine in (original, quantized)
    )
    return figures.compared(after, before)


def _measure_speed(
    original: Engine, quantized: Engine, speed: SpeedSpec | None
) -> SpeedPair | None:
    if speed is None:
        return None
    load = Load(**speed.model_dump())
    runners = [partial(run_once, engine) for engine in (original, quantized)]
    before, after = measure_in_turns(runners, load)
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    machine = {"load_average": load_average, "cores": os.cpu_count()}
    return SpeedPair(original=before, quantized=after, **machine)


@dataclass(frozen=True)
class _FloatStates:
    """An engine that finds no states in int8."""

    engine: Engine

    def score(self, ids: Tensor) -> Tensor:
        return self.engine.score(ids, rounded_states=False)


def _kept_states(engine: Engine, sequences: Sequence[Tensor]) -> KeptStates | None:
    """What states that are kept in int8 cost a model beyond all else that is quantized."""
    if engine.checkpoint.scheme.states is None:
        return None
    model = engine.model
    assert isinstance(model, CodeModel)
    return KeptStates(
        accuracy=compare(_FloatStates(engine), engine, sequences),
        float_bytes=model.state_bytes(),
        int8_bytes=model.state_bytes(int8=True),
    )


def _sizes(original: Engine, quantized: Engine) -> Sizes:
    shape = quantized.model.config
    elements = sum(own.count * (own.k_size + own.v_size) for own in shape.cached)
    config, names = original.checkpoint.config, original.checkpoint.names()
    first = (*attention_names(config), *block_names(config))[0]
    weight = next(n for n in names if n.startswith(f"{first}.") and n.endswith(".weight"))
    own = original.checkpoint.dtype(weight).itemsize
    return Sizes(
        original_weights=original.checkpoint.nbytes,
        quantized_weights=quantized.checkpoint.nbytes,
        original_kv=elements * own,
        quantized_kv=_cache_bytes(quantized, own),
        original_kv_here=original.kv_bytes_per_token,
        quantized_kv_here=quantized.kv_bytes_per_token,
    )


def _cache_bytes(quantized: Engine, own: int) -> int:
    """Bytes of one token's K and V, with scales of its own, as the scheme stores them."""
    checkpoint, total = quantized.checkpoint, 0
    for name, heads in zip(
        attention_names(checkpoint.config), quantized.model.config.cached, strict=True
    ):
        spec = checkpoint.kv_scheme_of(name) if quantized.quantized_kv else None
        if spec is None:
            total += heads.count * (heads.k_size + heads.v_size) * own
            continue
        sizes: dict[CacheRole, int] = {"k_cache": heads.k_size, "v_cache": heads.v_size}
        scales = 2 * spec.scale_bytes if spec.dynamic else 0
        bits = sum(spec.bits_of(role) * size for role, size in sizes.items())
        total += heads.count * (bits // 8 + scales)
    return total


def _kv_scales(checkpoint: Checkpoint) -> tuple[KVScales, ...]:
    return tuple(
        KVScales(
            module=name,
            k=tuple(k.reshape(len(k), -1).amax(dim=1).tolist()),
            v=tuple(v.reshape(len(v), -1).amax(dim=1).tolist()),
        )
        for name, (k, v) in checkpoint.kv_scales.items()
    )
