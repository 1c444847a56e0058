"""The record of a quantization run: what the report and a later reader know of how it went.

Everything measured on the way is here: seconds by phase, peak memory, the calibration tokens, the
smoothing that was chosen and the error of every module. `<output>/quantization.json` holds it; the
scale table stays in the checkpoint, its only home.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from calibrate.data import Kind, TokenSet
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scale_table import ScaleTable
from formats.scheme import Strict
from ptq.methods.common.events import Event, SmoothingRow
from ptq.output import CHECKPOINT_FOLDER, RESULT_FILE


class ModuleRow(Strict):
    """Signal-to-quantization-noise ratios of one linear layer in dB.

    None means that nothing was lost, or that it was not measured. `weight` compares the stored
    weight with the (smoothed) float weight, `input` the quantized input with the float one on
    calibration samples, `output` the layer's output with both quantized. The baseline is plain
    round-to-nearest on the original model.
    """

    module: str
    shape: tuple[int, int]
    weight_sqnr_db: float | None
    input_sqnr_db: float | None
    output_sqnr_db: float | None
    baseline_weight_sqnr_db: float | None
    baseline_output_sqnr_db: float | None


class BlockRow(Strict):
    """What a decoder block took: wall time, and peak memory of the process or, where blocks are
    solved on a GPU, of the GPU.
    """

    block: str
    seconds: float
    memory_bytes: int


class CalibrationSummary(Strict):
    """The tokens that the statistics were taken from; the last three as `TokenSet` has them."""

    source: str
    split: str
    sequences: int
    tokens: int
    fingerprint: str
    kind: Kind = "prose"
    notes: tuple[str, ...] = ()
    warning: str = ""

    @property
    def kind_name(self) -> str:
        """The kind for a reader: what is no chat may be prose, or code."""
        return "chat" if self.kind == "chat" else "plain text"

    @classmethod
    def of(cls, tokens: TokenSet) -> CalibrationSummary:
        """The record of a token set."""
        return cls(
            source=tokens.source,
            split=tokens.split,
            sequences=len(tokens.ids),
            tokens=tokens.tokens,
            fingerprint=tokens.fingerprint,
            kind=tokens.kind,
            notes=tokens.notes,
            warning=tokens.warning,
        )


class QuantizationRecord(Strict):
    """What `quantization.json` holds.

    Attributes:
        seconds: Wall time by phase; `total` is the whole.
        peak_rss_bytes: Peak resident memory of the process up to the end of the run.
        calibration: The tokens used.
        events: What a person should know, in block order.
        smoothing: One row for each smoothing group that was solved.
        modules: One row for each quantized linear layer.
        blocks: One row for each decoder block.
        resumed_blocks: Blocks that an earlier, interrupted run had solved; `seconds` is without it.
        model_key: Of the model that was quantized; see `ptq.pipeline.reuse.seen_key`.
        sink_tokens: Tokens at the beginning of each sample that were kept apart.
    """

    seconds: dict[str, float]
    peak_rss_bytes: int
    calibration: CalibrationSummary
    events: tuple[Event, ...]
    smoothing: tuple[SmoothingRow, ...]
    modules: tuple[ModuleRow, ...]
    blocks: tuple[BlockRow, ...] = ()
    resumed_blocks: int = 0
    model_key: str = ""
    sink_tokens: int = 0


class QuantizationResult(QuantizationRecord):
    """Outcome of `ptq.pipeline.driver.quantize`: the record, the checkpoint and its scale table."""

    checkpoint: Path
    scale_table: ScaleTable

    def to_json(self) -> str:
        """The record as JSON text; paths stay out, so that the output directory may be moved."""
        return self.model_dump_json(exclude={"checkpoint", "scale_table"}, indent=2) + "\n"


def load_result(output: Path) -> QuantizationResult:
    """Rebuild the result of a finished run from its output directory.

    Raises:
        CheckpointError: the record or the checkpoint is missing or damaged.
    """
    record = load_record(output)
    checkpoint = Checkpoint.open(output / CHECKPOINT_FOLDER)
    if checkpoint.scale_table is None:
        raise CheckpointError(f"{checkpoint.path}: found no scale table; run the recipe again")
    return QuantizationResult(
        **dict(record), checkpoint=checkpoint.path, scale_table=checkpoint.scale_table
    )


def load_record(output: Path) -> QuantizationRecord:
    """Read the record of a finished run.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = output / RESULT_FILE
    try:
        return QuantizationRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{path}: not a readable record of a quantization run ({error}). Give the output "
            "directory of a finished run, or run the recipe again"
        ) from error


class Stopwatch:
    """Wall time by phase; a phase that is entered again adds to its time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time until the context is left for phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        return dict(self._seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and `total` since the watch was made."""
        return self._seconds | {"total": time.perf_counter() - self._start}
