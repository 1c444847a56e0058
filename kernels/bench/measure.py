"""The table of `ptq bench --kernels`: cases are measured on a GPU or a CPU, a row a case, which is
printed as it is measured, or written to a file.

Beside a row may stand what others' kernels took on the same device, as measured once
(`peers/published_peers.json`): vLLM's kernels cannot be called where the project runs, so that
their times are constants with their source, microseconds of CUDA-graph replays, arguments rotated
past the cache, as ours. Where a peer quantizes its inputs in an op of its own, that op is part of
its time; ours is then compared with what quantizing adds to the op before it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.bench.case import CLOCKS, BenchCase, Limits
from kernels.bench.peers.torch_peers import Peers
from kernels.bench.shapes import AttentionShape, Gemm, Selection, Shape

PUBLISHED = Path(__file__).parent / "peers" / "published_peers.json"
NOMINAL = {  # bytes a microsecond; others of these generations have other memory
    "NVIDIA A100-SXM4-80GB": 2.04e6,
    "NVIDIA H100 80GB HBM3": 3.35e6,
    "NVIDIA H200": 4.8e6,
}


@dataclass(frozen=True)
class Published:
    """A time of another's kernel.

    Attributes:
        us: Microseconds.
        quantizes: Whether quantizing the inputs is part of it.
    """

    us: float
    kernel: str
    quantizes: bool


@cache
def _devices() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def source(device: str) -> str | None:
    """Where the times of a device come from; None where there are none."""
    return _devices().get(device, {}).get("source")


def published(device: str, shape: Shape) -> Published | None:
    """The fastest known of a shape, with results in bf16, on a device of that very name."""
    own = _devices().get(device, {})
    if isinstance(shape, Gemm) and shape.dtype == "bfloat16":
        family, size, rows = shape.family, f"{shape.outputs}x{shape.inputs}", shape.rows
    elif isinstance(shape, AttentionShape) and shape.even and not shape.kind:
        family, rows = f"attention {shape.cache}", shape.new
        size = f"{shape.sequences}x{shape.context}"
    else:
        return None
    found = own.get("microseconds", {}).get(family, {}).get(size, {}).get(str(rows))
    if found is None:
        return None
    us, kernel = found
    return Published(us, kernel, family in own["quantization_included"])


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
    data = {"torch": torch.__version__, "limits": asdict(limits)}
    data |= {"published": source(limits.device), "missing": reasons}
    data["rows"] = [asdict(row) | {"gain": row.gain} for row in rows]
    return json.dumps(data, indent=1) + "\n"


@cache
def copied_bandwidth() -> float:
    """Bytes a microsecond, read and written, of a kernel that copies 1 GiB, negated, on the GPU.

    In a CUDA graph `copy_` would be a memcpy node, which is a third slower.
    """
    x = torch.randint(-(2**31), 2**31, (1 << 28,), dtype=torch.int32, device="cuda")
    y, clock = torch.empty_like(x), CLOCKS["cuda"]
    sample = clock.sample(lambda i: torch.neg(x, out=y), 1)
    return 2 * x.nbytes / clock.times([sample])[0]


def gpu_limits() -> Limits:
    """Nominal bandwidth, or that of a large copy where the device is not known; a large GEMM.

    Products of 8 bits are taken to be twice as fast as those of 16.
    """
    copied, clock = copied_bandwidth(), CLOCKS["cuda"]
    rows, outputs, inputs = 4096, 28672, 4096
    a, b = (torch.randn(n, inputs, dtype=torch.bfloat16, device="cuda") for n in (rows, outputs))
    taken = clock.times([clock.sample(lambda i: F.linear(a, b), 1)])[0]
    rate, name = 2 * rows * outputs * inputs / taken, torch.cuda.get_device_name()
    bandwidth = NOMINAL.get(name, copied)
    speeds = f"{bandwidth / 1e6:.2f} TB/s, copy {copied / 1e6:.2f} TB/s"
    note = f"{speeds}, bf16 GEMM {rate / 1e6:.0f} TFLOP/s"
    return Limits(name, bandwidth, {"16 bits": rate, "8 bits": 2 * rate}, note)


@dataclass
class Bench:
    """A run of the benchmark.

    Attributes:
        peers: What else is measured, or None.
        wrong: Cases whose results were wrong, as messages.
    """

    limits: Limits
    peers: Peers | None = None
    wrong: list[str] = field(default_factory=list)
    _before: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def rows(self, cases: Iterable[tuple[str, BenchCase]]) -> Iterator[Row]:
        """Measure cases, given with their families; wrong ones are noted and left out."""
        for family, case in cases:
            try:
                yield self.row(family, case)
            except ValueError as error:
                self.wrong.append(str(error))

    def row(self, family: str, case: BenchCase) -> Row:
        """Measure one case, its plain twin and its peers, in turns.

        Raises:
            ValueError: its result is wrong.
        """
        error, shape = case.check(), case.shape
        samples = {"": case.sample(), **({} if self.peers is None else self.peers.of(shape))}
        twins = sorted(case.timed(case.twins), key=itemgetter(1))
        if twins:
            samples["plain"] = case.sample(twins[0][0])
        times = CLOCKS[case.device].times(list(samples.values()))
        peers = dict(zip(samples, times, strict=True))
        us, plain = peers.pop(""), peers.pop("plain", None)
        added = None
        if self.peers is not None and case.device == "cuda" and isinstance(shape, Gemm):
            added = None if "a16" in family else self.added(shape)
        floor, known = self.limits.floor(case), published(self.limits.device, shape)
        size = (case.nbytes, case.operations)
        return Row(family, case.name, us, floor, error, *size, added, plain, peers, known)

    def added(self, shape: Gemm) -> float:
        """What quantization of a layer's inputs adds to the op before."""
        from kernels.bench.gpu_cases import before

        kind = shape.family if shape.family.startswith("fp8") else "int8"
        size = shape.rows, shape.inputs, shape.inputs > shape.outputs
        for key, quantize in (((kind, *size), True), (("", *size), False)):
            if key not in self._before:
                self._before[key] = before(shape, quantize).time()
        return self._before[kind, *size] - self._before["", *size]


def cases_of(
    device: torch.device, families: Iterable[str], selection: Selection
) -> Iterator[tuple[str, BenchCase]]:
    """The cases of families on a device, each made when the one before is done with."""
    if device.type == "cuda":
        from kernels.bench import gpu_attention, gpu_cases
        from kernels.triton.common import Workspace

        workspace = Workspace.on("cuda")
        kinds = {**gpu_attention.CASES, **gpu_cases.CASES}
        made = {family: partial(make, workspace) for family, make in kinds.items()}
    else:
        from kernels.bench import cpu_cases

        made = cpu_cases.CASES
    for family in families:
        for case in islice(made[family](selection), selection.most):
            yield family, case


def limits_of(device: torch.device) -> Limits:
    """Measure a device."""
    if device.type == "cuda":
        return gpu_limits()
    from kernels.bench.cpu_cases import measure_limits

    return measure_limits()


def measure(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print and write what is asked for; 1 where a result was wrong."""
    shapes, counts = (own and tuple(own) for own in (arguments.shapes, arguments.rows))
    selection = Selection(arguments.table, shapes, counts, arguments.most)
    peers, kind = Peers(device) if arguments.peers else None, device.type
    bench, rows, below = Bench(limits_of(device), peers), [], []
    print(describe(bench.limits), line(kind, header(kind)), sep="\n", flush=True)
    try:
        for row in bench.rows(cases_of(device, arguments.families, selection)):
            print(line(kind, cells(kind, row)), flush=True)
            rows.append(row)
    finally:  # what was measured stays if the rest fails
        missing, reasons = ([], {}) if peers is None else (peers.messages(), peers.reasons)
        below = notes(bench.limits, rows, missing)
        if arguments.json is not None:
            text = to_json(bench.limits, rows, reasons)
            arguments.json.write_text(text, encoding="utf-8")
        if arguments.markdown is not None:
            text = markdown(kind, bench.limits, rows, missing)
            arguments.markdown.write_text(text, encoding="utf-8")
    print(*(f"- {text}" for text in below), *(f"WRONG {text}" for text in bench.wrong), sep="\n")
    return 1 if bench.wrong else 0
