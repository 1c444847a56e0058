"""What recipes are known to cost: figures measured on real models, a row of `recipes/measured.csv`
each, which `python -m recipes.run_all` writes.

A run is judged by what its scheme and methods have lost on the model that is nearest to its own,
and advice rests on what others have lost there. A model of another family stands as far off as one
of twice the size does.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from formats.families.values import named_dtype
from formats.files import replace_file
from formats.namespace import ROOT
from formats.scheme import Strict
from inference.accuracy import Accuracy
from ptq.plan.plan import ModelSummary

TABLE = ROOT / "recipes" / "measured.csv"
MARGIN = 2.0  # other text and fewer samples have moved a KL by as much
# Nats that two models are apart at most by computing in bf16: each is 0.0011 off itself in fp32
# (SmolLM2, one H100).
NOISE = 0.0022


class Known(Strict):
    """What one recipe cost on one model.

    Attributes:
        family: The model's `model_type`.
        original_bits: Bits of a weight in the file that it was made from, 16 as a rule. Of what
            was 4 bits before, int4 weights lose less than others would.
        scheme: What was quantized, as a report names it.
        methods: Their names, as a table of runs has them.
        weights: Their bytes as a factor of the original's; None where that was not kept, as below.
        cache: Bytes of the cache, likewise.
        perplexity: As a factor of the original's, with its 95% interval.
        kl: Mean KL divergence in nats, with its 95% interval.
        top1: Share of predictions where both find the same token most likely.
        prefill: Tokens per second as a factor of the original's.
        decode: The same of decoding.
        seconds: Of the quantization.
        text: What it was measured on.
        made: Year, month and day.
    """

    model: str
    family: str
    parameters: int
    original_bits: int = 16
    recipe: str
    scheme: str
    methods: str
    weights: float | None = None
    cache: float | None = None
    perplexity: float
    perplexity_low: float | None = None
    perplexity_high: float | None = None
    kl: float
    kl_low: float | None = None
    kl_high: float | None = None
    top1: float | None = None
    prefill: float | None = None
    decode: float | None = None
    seconds: float | None = None
    text: str
    device: str
    made: str
    version: str

    @property
    def flattered(self) -> bool:
        """Whether the weights were of as few bits before, so that others may lose more."""
        return self.original_bits <= 4 and re.search("w4|fp4", self.scheme) is not None

    @property
    def ordered(self) -> bool:
        """Whether a budget chose the bits: the loss is what was ordered, not a scheme's cost."""
        return self.recipe == "budget"

    @property
    def title(self) -> str:
        """The model, for a reader."""
        return f"{self.model} ({self.parameters / 1e6:,.0f} M parameters; {self.text})"

    def distance(self, model: ModelSummary) -> float:
        """How far off another model is: doublings of the size, and one for another family."""
        size = abs(math.log2(model.parameters / self.parameters))
        return size + len({self.family, model.model_type}) - 1


def known_figures() -> tuple[Known, ...]:
    """All rows of the table."""
    return _read(TABLE)


@cache
def _read(path: Path) -> tuple[Known, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    return tuple(Known.model_validate_strings(row) for row in rows)


def write_figures(rows: Iterable[Known]) -> None:
    """Write the table: models by size, the least KL divergence of each first."""
    ordered = sorted(rows, key=lambda row: (row.parameters, row.model, row.kl, row.recipe))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Known.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.model_dump() for row in ordered)
    replace_file(TABLE, text.getvalue().encode())
    _read.cache_clear()


def nearest(
    scheme: str, methods: str, model: ModelSummary, rows: Sequence[Known] | None = None
) -> Known | None:
    """What a scheme by some methods lost on the nearest model; None where it was not measured."""
    same = [
        row
        for row in (known_figures() if rows is None else rows)
        if (row.scheme, row.methods) == (scheme, methods) and not (row.flattered or row.ordered)
    ]
    return min(same, key=lambda row: row.distance(model), default=None)


def rounding_noise(device: str, config: Mapping[str, Any]) -> float:
    """KL divergence in nats of a model and another by rounding alone, where both run on a device.

    A CPU computes in fp32; a GPU in bf16, but fp16 models in fp16.
    """
    return 0.0 if device == "cpu" or named_dtype(config) == "float16" else NOISE


def known_limit(kl: float, measured_on: str, noise: float) -> float:
    """Most nats that another run may lose by a recipe that lost `kl` on a device.

    What was measured on a GPU has the noise of its rounding in it.
    """
    return MARGIN * kl + (0.0 if measured_on.startswith("NVIDIA") else noise)


def beside_margin(kl: float, limit: float) -> str:
    """What a limit allows beyond the margin over a known loss, in words; empty where nothing."""
    return " and the rounding of bf16" if limit > MARGIN * kl else ""


def least(accuracy: Accuracy) -> float:
    """The KL divergence that a run loses at the least: its interval's lower end."""
    return accuracy.kl_mean if accuracy.kl_mean_ci is None else accuracy.kl_mean_ci[0]
