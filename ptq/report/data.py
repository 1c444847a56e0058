"""What a report holds: the data of its pages, and `report.json` itself.

`Provenance` says what it was made of, when and with what: enough to make it again.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version as version_of
from pathlib import Path

from formats.namespace import version
from formats.scale_table import ScaleTable
from formats.scheme import Strict
from inference.accuracy import Accuracy
from inference.bench.figures import Speed, environment
from ptq.evaluate.comparison import report_devices
from ptq.evaluate.figures import TaskRow
from ptq.peers.measure import PeerRow
from ptq.plan.plan import ModelSummary
from ptq.recipe.schema import Recipe, ThresholdsSpec
from ptq.recipe.strict_yaml import parse
from ptq.report.attribution import Attribution
from ptq.report.generated import Completion, DraftPair
from ptq.report.inspection import OutlierRow
from ptq.report.known import MARGIN, Known, beside_margin, known_limit, least
from ptq.result import CalibrationSummary, QuantizationRecord
from ptq.search.choice import BudgetRecord


class Check(Strict):
    """One limit beside what was measured.

    Attributes:
        name: Its key in the recipe.
        limit: The recipe's threshold, or what its scheme is known to lose with a margin.
        upper: Whether the limit is an upper bound; otherwise it is a lower one.
        holds: Whether the figure keeps it, or, of what is known, may do so by its interval; a
            figure that is not a number never does.
    """

    name: str
    measured: float
    limit: float
    upper: bool
    holds: bool


class Sizes(Strict):
    """Bytes of the original and of the quantized model.

    Attributes:
        original_weights: The weight files of the original.
        quantized_weights: The weight files of the checkpoint, and the scales of its cache.
        original_kv: K and V of one token in all layers, in the original's own type.
        quantized_kv: The same as the checkpoint's scheme stores them.
        original_kv_here: K and V as the engine held them while it measured: float caches are
            fp32 on a CPU.
        quantized_kv_here: K and V of one token of the quantized model, as the engine held them.
    """

    original_weights: int
    quantized_weights: int
    original_kv: int
    quantized_kv: int
    original_kv_here: int
    quantized_kv_here: int


class SpeedPair(Strict):
    """Speed of both models, measured in turns.

    Attributes:
        load_average: Of the machine's last minute when both had been measured, this process
            included; None where the system tells none.
        cores: Of the machine.
    """

    original: Speed
    quantized: Speed
    load_average: float | None = None
    cores: int | None = None

    @property
    def loaded(self) -> str:
        """`load average 9.1 on 4 cores` where more ran than this process; else empty.

        This process alone keeps each core busy at most once.
        """
        load, cores = self.load_average, self.cores
        if load is None or cores is None or load <= cores + 0.5:
            return ""
        return f"load average {load:.1f} on {cores} cores"


class KeptStates(Strict):
    """Recurrent states that are kept in int8, as the scheme says (`formats.cache_scheme`).

    Attributes:
        accuracy: The quantized model with each block of 64 tokens computed as if the state before
            it had been found, against itself with states in float.
        float_bytes: Of one sequence's state as it runs.
        int8_bytes: The same as it is kept.
    """

    accuracy: Accuracy
    float_bytes: int
    int8_bytes: int


class KVScales(Strict):
    """Static scales of one layer's cache, by KV head; the largest where channels have their own."""

    module: str
    k: tuple[float, ...]
    v: tuple[float, ...]


class AlsoMeasured(Strict):
    """Accuracy on text of another kind: chats where the evaluation's own is none, or prose."""

    text: CalibrationSummary
    accuracy: Accuracy


class ReportData(Strict):
    """Everything that was measured, and the verdict.

    Attributes:
        passed: Whether every limit holds; True where there is none.
        checks: The recipe's thresholds beside what was measured; where it has none, what its scheme
            is known to lose.
        known: Where the latter was measured; None where the recipe has thresholds, or nothing is
            known of its scheme by its methods.
        failures: Sentences for those that do not hold.
        scheme: Such as `a8w8c8`.
        sizes: Bytes of both.
        speed: Tokens per second of both; None where the recipe does not ask for it.
        evaluation: The tokens that accuracy was measured on.
        quantization: Record of the run: times, memory, calibration tokens, smoothing, errors of
            modules.
        outliers: Channels of the inputs that calibration saw, as quantized: after smoothing.
        seconds: Wall time of the comparison and of the measurement of speed.
        recipe: The resolved recipe as YAML, with full paths: `ptq run` on it repeats the run.
        drafts: Tokens a step with drafts of the layer that predicts further tokens, on the starts
            of the evaluation's sequences; None where there is no such layer, or none that runs.
        budget: What was chosen for a budget, and from what; None where the recipe has none.
        attribution: Where the loss comes from, or why that was not measured.
        also: Accuracy on text of another kind; None where there is none.
        further: Accuracy on tokens that stand further in one text than the evaluation's windows
            reach; None where the cache is not quantized, or there is no text of that length.
        states: What kept states in int8 cost, which `accuracy` includes; None without any.
    """

    title: str
    provenance: Provenance
    passed: bool
    checks: tuple[Check, ...]
    failures: tuple[str, ...]
    model: ModelSummary
    scheme: str
    accuracy: Accuracy
    sizes: Sizes
    speed: SpeedPair | None
    evaluation: CalibrationSummary
    quantization: QuantizationRecord
    scale_table: ScaleTable
    kv_scales: tuple[KVScales, ...]
    outliers: tuple[OutlierRow, ...]
    environment: dict[str, str | int]
    seconds: dict[str, float]
    recipe: str
    peers: tuple[PeerRow, ...] = ()
    tasks: tuple[TaskRow, ...] = ()
    completions: tuple[Completion, ...] = ()
    drafts: DraftPair | None = None
    budget: BudgetRecord | None = None
    attribution: Attribution | str = "the recipe says `attribution: false`"
    known: Known | None = None
    also: AlsoMeasured | None = None
    further: Accuracy | None = None
    states: KeptStates | None = None


LABELS = {
    "perplexity_ratio": "perplexity ratio",
    "kl": "mean KL (nats)",
    "top1_agreement": "top-1 agreement",
}


def keeps(measured: float, limit: float, upper: bool) -> bool:
    """Whether a figure itself keeps an upper or a lower limit."""
    return measured <= limit if upper else measured >= limit


def check_thresholds(thresholds: ThresholdsSpec, accuracy: Accuracy) -> tuple[Check, ...]:
    """Hold what was measured against the recipe's thresholds; those that are null are left out."""
    figures = (
        ("perplexity_ratio", accuracy.perplexity_ratio, thresholds.perplexity_ratio, True),
        ("kl", accuracy.kl_mean, thresholds.kl, True),
        ("top1_agreement", accuracy.top1_agreement, thresholds.top1_agreement, False),
    )
    return tuple(
        Check(
            name=name,
            measured=measured,
            limit=limit,
            upper=upper,
            holds=keeps(measured, limit, upper),
        )
        for name, measured, limit, upper in figures
        if limit is not None
    )


def check_known(known: Known, accuracy: Accuracy, noise: float = 0.0) -> Check:
    """Hold a run against what its scheme lost elsewhere: only what is surely more does not hold.

    `noise` is what rounding alone makes of it (`ptq.report.known.rounding_noise`).
    """
    limit = known_limit(known.kl, known.device, noise)
    holds = least(accuracy) <= limit
    return Check(name="kl", measured=accuracy.kl_mean, limit=limit, upper=True, holds=holds)


@lru_cache(1)
def recipe_values(recipe: str) -> dict:
    """What a resolved recipe says, which a report looks up again and again."""
    return parse(recipe).data


def methods_of(recipe: str) -> list[str]:
    """The methods of a resolved recipe, by name."""
    return [next(iter(method)) for method in recipe_values(recipe).get("methods", [])]


def method_names(recipe: str) -> str:
    """The methods of a resolved recipe, as tables name them."""
    return ", ".join(methods_of(recipe)) or "none"


def known_methods(recipe: str) -> str:
    """Those by which figures of recipes are found: without what they do for few models alone."""
    return ", ".join(name for name in methods_of(recipe) if name != "shift") or "none"


def failure(check: Check, known: Known | None = None) -> str:
    """A sentence for a limit that does not hold."""
    side = "above" if check.upper else "below"
    if known is not None:
        return (
            f"{LABELS[check.name]} {check.measured:.2g} is surely more than {MARGIN:g} x "
            f"{known.kl:.3g}, which `{known.recipe}` lost on {known.title}"
            f"{beside_margin(known.kl, check.limit)}"
        )
    return (
        f"{LABELS[check.name]} {check.measured:.6g} is {side} the threshold {check.limit:g} "
        f"(report.thresholds.{check.name})"
    )


class Provenance(Strict):
    """Where, when and with what a report was made.

    Attributes:
        made: Date and time in UTC, such as `2025-03-01 14:05 UTC`.
        model: Full path of the original, or its name and commit on the hub.
        checkpoint: Full path of the quantized checkpoint.
        device: Where both models ran: the name of the processor or of the GPU.
        threads: Threads of the processor that they were allowed.
        versions: Of ptq and of what it stands on, by name.
    """

    made: str
    model: str
    checkpoint: str
    device: str
    threads: int
    versions: dict[str, str]

    def line(self) -> str:
        """The least of it, in one line."""
        return f"{self.made} · ptq {self.versions['ptq']} · {self.device}"


def provenance_of(recipe: Recipe, checkpoint: Path) -> Provenance:
    """What a report of this recipe's run is made of, now and here."""
    machine = environment(report_devices(recipe)[0])
    return Provenance(
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        model=recipe.model.title,
        checkpoint=str(checkpoint.absolute()),
        device=str(machine.get("gpu", machine["processor"])),
        threads=int(machine["threads"]),
        versions={
            "ptq": version(),
            "torch": str(machine["torch"]),
            "transformers": version_of("transformers"),
            "Python": str(machine["python"]),
        },
    )
