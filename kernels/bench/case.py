"""What is measured: an op on one shape with arguments that no cache holds, checked, then timed.

The table of `ptq bench --kernels`: a row a case, printed as it is measured, or as a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.bench.peers.published import Published, source
from kernels.bench.shapes import Shape
from kernels.bench.timing import CLOCKS


@dataclass(frozen=True)
class BenchCase:
    """One op on one shape.

    Attributes:
        name: Of the op and shape, for a person.
        shape: What is computed, for peers that compute the same.
        call: call(i, cut) with the i-th set of arguments; `cut` a tile or the like, or None for
            what a model runs.
        copies: Sets of arguments.
        nbytes: Read and written by one call, at least.
        error: Distance of the result of call(0, ...) from the fp64 twin's, relative.
        tolerance: The largest error of a right result.
        operations: Multiplications and additions, where they may be the limit.
        unit: What multiplies them, a key of `Limits.rates`.
        twins: Cuts of the plain Triton kernel, where a model runs one with stated layouts (Gluon).
        device: `cuda` or `cpu`.
    """

    name: str
    shape: Shape
    call: Callable[[int, Any], Tensor]
    copies: int
    nbytes: int
    error: Callable[[Tensor], float]
    tolerance: float
    operations: float = 0.0
    unit: str = "16 bits"
    twins: tuple[Any, ...] = ()
    device: str = "cuda"

    def check(self, cut: Any = None) -> float:
        """The error of one call; raises ValueError where it is too large or NaN."""
        found = self.error(self.call(0, cut))
        if not found < self.tolerance:
            raise ValueError(f"{self.name} with {cut}: error {found}, allowed is {self.tolerance}")
        return found

    def sample(self, cut: Any = None) -> Callable[[], float]:
        """What gives the microseconds of a call, measured anew each time."""
        return CLOCKS[self.device].sample(lambda i: self.call(i, cut), self.copies)

    def time(self, cut: Any = None) -> float:
        """Microseconds of one call."""
        return CLOCKS[self.device].times([self.sample(cut)])[0]


@dataclass(frozen=True)
class Limits:
    """What a device does at most.

    Attributes:
        device: Its name.
        bandwidth: Bytes a microsecond.
        rates: Operations a microsecond, by what multiplies.
        note: How they were found, for a person.
    """

    device: str
    bandwidth: float
    rates: Mapping[str, float]
    note: str = ""

    def floor(self, case: BenchCase) -> float:
        """Microseconds that no implementation of a case can beat."""
        return max(case.nbytes / self.bandwidth, case.operations / self.rates[case.unit])


@dataclass(frozen=True)
class Row:
    """One case as measured; microseconds.

    Attributes:
        floor: What no implementation can beat.
        error: Distance from the twin in fp64, relative.
        nbytes: Read and written.
        operations: Multiplications and additions.
        added: What quantization of the inputs adds to the op before, if they are quantized.
        plain: Of the plain Triton kernel with the best of a few tiles, where the one that runs has
            its layouts stated (Gluon).
        peers: Of stock torch, by name.
        published: Of another's kernel on the same device, measured once.
    """

    family: str
    name: str
    us: float
    floor: float
    error: float
    nbytes: int = 0
    operations: float = 0.0
    added: float | None = None
    plain: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    published: Published | None = None

    @property
    def gain(self) -> float | None:
        """How much faster than the plain kernel: 0.1 where that takes a tenth longer."""
        return None if self.plain is None else self.plain / self.us - 1

    @property
    def best(self) -> tuple[float, str] | None:
        """The fastest peer's time and name."""
        return min(((us, name) for name, us in self.peers.items()), default=None)

    @property
    def against_published(self) -> float | None:
        """Times as fast as the published kernel, with what quantizing adds where it does that."""
        if self.published is None:
            return None
        added = max(0.0, self.added or 0.0) if self.published.quantizes else 0.0
        return self.published.us / (self.us + added)


def _text(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


Column = tuple[str, int, Callable[[Row], str]]
OWN: tuple[Column, ...] = (
    ("", -50, lambda row: row.name),
    ("us", 9, lambda row: _text(row.us)),
    ("floor", 9, lambda row: _text(row.floor)),
    ("of it", 6, lambda row: _text(row.floor / row.us, ".0%")),
    ("error", 8, lambda row: _text(row.error, ".1e")),
)
BEST: tuple[Column, ...] = (
    ("best torch", 10, lambda row: _text(row.best and row.best[0])),
    ("ratio", 6, lambda row: _text(row.best and row.best[0] / row.us)),
    ("op", -13, lambda row: row.best[1] if row.best else "-"),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "cuda": (
        *OWN,
        ("+ quant", 8, lambda row: _text(row.added)),
        ("plain", 9, lambda row: _text(row.plain)),
        ("gain", 7, lambda row: _text(row.gain, "+.0%")),
        *BEST,
        ("published", 9, lambda row: _text(row.published and row.published.us)),
        ("ratio", 6, lambda row: _text(row.against_published)),
        ("kernel", -1, lambda row: row.published.kernel if row.published else "-"),
    ),
    "cpu": (
        *OWN,
        ("GB/s", 7, lambda row: _text(row.nbytes / row.us / 1e3, ".1f")),
        ("GOPS", 6, lambda row: _text(row.operations / row.us / 1e3 or None, ".0f")),
        *BEST,
    ),
}


def header(device: str) -> list[str]:
    """Titles of the columns of a device, `cuda` or `cpu`."""
    return [title for title, _, _ in COLUMNS[device]]


def cells(device: str, row: Row) -> list[str]:
    """A row's columns as text."""
    return [text(row) for _, _, text in COLUMNS[device]]


def line(device: str, texts: Sequence[str]) -> str:
    """A line of the printed table: text to the left, numbers to the right."""
    widths = [width for _, width, _ in COLUMNS[device]]
    padded = [f"{t:<{-w}}" if w < 0 else f"{t:>{w}}" for t, w in zip(texts, widths, strict=True)]
    return " ".join(padded).rstrip()


def describe(limits: Limits) -> str:
    """One line on the device."""
    return f"{limits.device}, torch {torch.__version__}: {limits.note}; microseconds"


def notes(limits: Limits, rows: Sequence[Row], missing: Sequence[str]) -> list[str]:
    """What stands below a table: why peers are missing, and where published times come from."""
    sources = [source(limits.device)] if any(row.published for row in rows) else []
    return [*missing, *(f"published: {text}" for text in sources)]


def markdown(device: str, limits: Limits, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """The table in Markdown."""
    titles = header(device)
    lines = [describe(limits), "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(cells(device, row))} |" for row in rows]
    below = [f"- {text}" for text in notes(limits, rows, missing)]
    return "\n".join([*lines, "", *below]).rstrip() + "\n"


def to_json(limits: Limits, rows: Sequence[Row], missing: dict[tuple[str, str], int]) -> str:
    """All figures; bytes and operations a microsecond."""
    reasons = [{"peer": peer, "reason": why, "rows": n} for (peer, why), n in missing.items()]
    data = {
        "torch": torch.__version__,
        "limits": asdict(limits),
        "published": source(limits.device),
        "missing": reasons,
        "rows": [asdict(row) | {"gain": row.gain} for row in rows],
    }
    return json.dumps(data, indent=1) + "\n"
