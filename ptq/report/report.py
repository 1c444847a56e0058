"""What the quantization cost, measured on the real kernels.

Both models run in this project's engine: the original as it came, the quantized one with its
integer kernels and its quantized cache. The report is one HTML file, Markdown and JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from calibrate.data import TokenSet, load_tokens
from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.families.registry import attention_names, family_of
from formats.files import building_directory, write_bytes
from inference.accuracy import compare
from inference.bench.figures import environment
from inference.bench.load import Load, run_once
from inference.bench.turns import measure_in_turns
from inference.config import EngineConfig
from inference.engine import Engine
from inference.scheduling.blocks import blocks_for
from ptq.output import REPORT_FOLDER, STATISTICS_FILE
from ptq.peers.measure import PeerRow, PeersRecord, measure_peers
from ptq.plan.plan import Plan
from ptq.recipe.reading import resolved_yaml
from ptq.recipe.schema import SpeedSpec
from ptq.report.data import (
    KVScales,
    ReportData,
    Sizes,
    SpeedPair,
    check_thresholds,
    failure,
)
from ptq.report.outliers import activation_outliers
from ptq.report.pages import draw_plots, render_html, render_markdown
from ptq.report.provenance import provenance_of
from ptq.report.summary import summary_rows
from ptq.result import CalibrationSummary, QuantizationRecord, QuantizationResult, Stopwatch


@dataclass(frozen=True)
class Report:
    """Outcome of a report.

    Attributes:
        passed: Whether every threshold of the recipe holds.
        failures: A sentence for each that does not.
        summary_rows: Head and rows of the table that a run ends with.
        folder: Where report.html, report.md and report.json lie.
        data: Everything that was measured.
    """

    passed: bool
    failures: tuple[str, ...]
    summary_rows: tuple[tuple[str, ...], ...]
    folder: Path
    data: ReportData


def make_report(
    result: QuantizationResult,
    plan: Plan,
    evaluation: TokenSet | None = None,
    *,
    progress: bool = True,
) -> Report:
    """Compare a quantized checkpoint with its original, and write the report beside it.

    Args:
        result: The finished quantization.
        plan: What it followed; its recipe says what is measured and where the output lies.
        evaluation: The recipe's evaluation tokens; None reads them.
        progress: Show progress bars.

    Raises:
        RecipeError: the evaluation text cannot be used.
        CheckpointError: a checkpoint is damaged, or the report cannot be written.
        EngineError: a model gives NaN or infinity.
    """
    data = measure(result, plan, evaluation, progress=progress)
    folder = plan.recipe.output.path / REPORT_FOLDER
    write_report(data, folder)
    return Report(data.passed, data.failures, tuple(summary_rows(data)), folder, data)


def measure(
    result: QuantizationResult,
    plan: Plan,
    evaluation: TokenSet | None = None,
    *,
    progress: bool = True,
) -> ReportData:
    """Run both models and gather the report's data; arguments and errors as in `make_report`."""
    recipe, watch = plan.recipe, Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.folder, local_files_only=True)
    evaluation = evaluation or load_tokens(recipe.dataset, tokenizer, "evaluation")
    config = engine_config(evaluation, recipe.report.speed)
    with watch.phase("loading both models"):
        device = recipe.report.device
        original = Engine.from_pretrained(recipe.model.folder, config=config, device=device)
        quantized = Engine.from_pretrained(result.checkpoint, config=config, device=device)
    with watch.phase("comparison"):
        accuracy = compare(original, quantized, evaluation.sequences(), progress=progress)
    with watch.phase("speed"):
        speed = _measure_speed(original, quantized, recipe.report.speed)
    peers: tuple[PeerRow, ...] = ()
    if recipe.report.peers:
        with watch.phase("other tools"):
            calibration = load_tokens(recipe.dataset, tokenizer, "calibration")
            peers = measure_peers(recipe, original, calibration, evaluation, progress=progress)
    checks = check_thresholds(recipe.report.thresholds, accuracy)
    statistics = result.checkpoint.parent / STATISTICS_FILE
    mixed = ", mixed" if quantized.checkpoint.own_schemes else ""
    scheme = f"{quantized.checkpoint.scheme.wac}{mixed}"
    seconds = watch.seconds()
    seconds.pop("total")
    return ReportData(
        provenance=provenance_of(recipe, result.checkpoint),
        title=f"{recipe.model.path.name} in {scheme}",
        passed=all(check.holds for check in checks),
        checks=checks,
        failures=tuple(failure(check) for check in checks if not check.holds),
        model=plan.model,
        scheme=scheme,
        accuracy=accuracy,
        sizes=_sizes(original, quantized),
        speed=speed,
        evaluation=CalibrationSummary.of(evaluation),
        quantization=QuantizationRecord(
            **{name: getattr(result, name) for name in QuantizationRecord.model_fields}
        ),
        scale_table=result.scale_table,
        kv_scales=_kv_scales(quantized.checkpoint),
        outliers=tuple(activation_outliers(Statistics.load(statistics))),
        environment=environment(recipe.report.device),
        seconds=seconds,
        recipe=resolved_yaml(recipe),
        peers=peers,
    )


def measure_only_peers(plan: Plan, *, progress: bool = True) -> PeersRecord:
    """Compare the peers of a plan's recipe with its model, without a run of our own.

    Raises:
        RecipeError: the data cannot be used.
        CheckpointError: the model is damaged.
    """
    recipe = plan.recipe
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.folder, local_files_only=True)
    calibration = load_tokens(recipe.dataset, tokenizer, "calibration")
    evaluation = load_tokens(recipe.dataset, tokenizer, "evaluation")
    original = Engine.from_pretrained(recipe.model.folder, config=engine_config(evaluation, None))
    return PeersRecord(
        model=plan.model,
        calibration=CalibrationSummary.of(calibration),
        evaluation=CalibrationSummary.of(evaluation),
        environment=environment(),
        peers=measure_peers(recipe, original, calibration, evaluation, progress=progress),
    )


def write_report(data: ReportData, folder: Path) -> None:
    """Write report.html, report.md and report.json; the folder is replaced at once or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    page = render_html(data, draw_plots(data))
    with building_directory(folder, replace=True) as temporary:
        write_bytes(temporary / "report.html", page.encode())
        write_bytes(temporary / "report.md", render_markdown(data).encode())
        write_bytes(temporary / "report.json", (data.model_dump_json(indent=1) + "\n").encode())


def engine_config(evaluation: TokenSet, speed: SpeedSpec | None) -> EngineConfig:
    """Room for the longest sequence, and for the measurement of speed at once."""
    longest, places, blocks = max(evaluation.ids.shape[1], 2), 1, 1
    if speed is not None:
        total = speed.prompt_tokens + speed.new_tokens
        longest, places = max(longest, total), speed.batch
        blocks = places * blocks_for(total)
    return EngineConfig(
        max_batch_size=places, max_model_len=longest, kv_blocks=max(blocks, blocks_for(longest))
    )


def _measure_speed(
    original: Engine, quantized: Engine, speed: SpeedSpec | None
) -> SpeedPair | None:
    if speed is None:
        return None
    load = Load(**speed.model_dump())
    runners = [partial(run_once, engine) for engine in (original, quantized)]
    before, after = measure_in_turns(runners, load)
    return SpeedPair(original=before, quantized=after)


def _sizes(original: Engine, quantized: Engine) -> Sizes:
    shape = quantized.model.config
    elements = 2 * shape.layers * shape.kv_heads * shape.head_dim
    config = original.checkpoint.config
    key = f"{attention_names(config)[0]}.{family_of(config).attention.k}.weight"
    own = original.checkpoint.dtype(key).itemsize
    return Sizes(
        original_weights=original.checkpoint.nbytes,
        quantized_weights=quantized.checkpoint.nbytes,
        original_kv=elements * own,
        quantized_kv=_cache_bytes(quantized, elements, own),
        original_kv_here=original.kv_bytes_per_token,
        quantized_kv_here=quantized.kv_bytes_per_token,
    )


def _cache_bytes(quantized: Engine, elements: int, own: int) -> int:
    """Bytes of one token's K and V, with scales of its own, as the scheme stores them."""
    spec, shape = quantized.checkpoint.scheme.kv_cache, quantized.model.config
    if not quantized.quantized_kv or spec is None:
        return elements * own
    scales = 2 * shape.layers * shape.kv_heads * 4 if spec.dynamic else 0
    return elements * spec.bits // 8 + scales


def _kv_scales(checkpoint: Checkpoint) -> tuple[KVScales, ...]:
    return tuple(
        KVScales(
            module=name, k=tuple(k.reshape(len(v), -1).amax(dim=1).tolist()), v=tuple(v.tolist())
        )
        for name, (k, v) in checkpoint.kv_scales.items()
    )
