"""Measuring the cases of `ptq bench --kernels` on a GPU or a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from kernels.bench.case import (
    BenchCase,
    Limits,
    Row,
    cells,
    describe,
    header,
    line,
    markdown,
    notes,
    to_json,
)
from kernels.bench.peers.published import published
from kernels.bench.peers.run import Peers
from kernels.bench.shapes import Gemm, Selection
from kernels.bench.timing import CLOCKS

NOMINAL = {  # bytes a microsecond; others of these generations have other memory
    "NVIDIA A100-SXM4-80GB": 2.04e6,
    "NVIDIA H100 80GB HBM3": 3.35e6,
    "NVIDIA H200": 4.8e6,
}


def gpu_limits() -> Limits:
    """Nominal bandwidth, or that of a large copy where the device is not known; a large GEMM.

    Products of 8 bits are taken to be twice as fast as those of 16.
    """
    x = torch.randint(-(2**31), 2**31, (1 << 28,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    clock = CLOCKS["cuda"]
    copied = 2 * x.nbytes / clock.times([clock.sample(lambda i: y.copy_(x), 1)])[0]
    rows, outputs, inputs = 4096, 28672, 4096
    a, b = (torch.randn(n, inputs, dtype=torch.bfloat16, device="cuda") for n in (rows, outputs))
    taken = clock.times([clock.sample(lambda i: F.linear(a, b), 1)])[0]
    rate, name = 2 * rows * outputs * inputs / taken, torch.cuda.get_device_name()
    bandwidth = NOMINAL.get(name, copied)
    note = (
        f"{bandwidth / 1e6:.2f} TB/s, copy {copied / 1e6:.2f} TB/s, bf16 GEMM "
        f"{rate / 1e6:.0f} TFLOP/s"
    )
    return Limits(name, bandwidth, {"16 bits": rate, "8 bits": 2 * rate}, note)


@dataclass
class Bench:
    """A run of the benchmark.

    Attributes:
        limits: The device's.
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
        twin = fastest(case, case.twins)
        if twin is not None:
            samples["plain"] = case.sample(twin)
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
        from kernels.bench.gpu_rows import before

        kind = shape.family if shape.family.startswith("fp8") else "int8"
        size = shape.rows, shape.inputs, shape.inputs > shape.outputs
        for key, quantize in (((kind, *size), True), (("", *size), False)):
            if key not in self._before:
                self._before[key] = before(shape, quantize).time()
        return self._before[kind, *size] - self._before["", *size]


def fastest(case: BenchCase, cuts: Iterable[Any]) -> Any | None:
    """The fastest of some cuts that fit on the device and are right; None where none is."""
    timed = []
    for cut in cuts:
        from triton.runtime.errors import OutOfResources

        try:
            case.check(cut)
            timed.append((case.time(cut), len(timed), cut))
        except OutOfResources:
            continue
    return min(timed)[2] if timed else None


def cases_of(
    device: torch.device, families: Iterable[str], selection: Selection
) -> Iterator[tuple[str, BenchCase]]:
    """The cases of families on a device."""
    if device.type == "cuda":
        from kernels.bench.gpu_cases import of_families
    else:
        from kernels.bench.cpu_cases import of_families
    return of_families(families, selection)


def limits_of(device: torch.device) -> Limits:
    """Measure a device."""
    if device.type == "cuda":
        return gpu_limits()
    from kernels.bench.cpu_cases import measure_limits

    return measure_limits()


def measure(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print and write what is asked for; 1 where a result was wrong."""
    shapes, counts = arguments.shapes, arguments.rows
    selection = Selection(
        arguments.table, shapes and tuple(shapes), counts and tuple(counts), arguments.most
    )
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
            arguments.json.write_text(to_json(bench.limits, rows, reasons), encoding="utf-8")
        if arguments.markdown is not None:
            text = markdown(kind, bench.limits, rows, missing)
            arguments.markdown.write_text(text, encoding="utf-8")
    print(*(f"- {text}" for text in below), *(f"WRONG {text}" for text in bench.wrong), sep="\n")
    return 1 if bench.wrong else 0
