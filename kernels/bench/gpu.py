"""`ptq kernels [families]`: every GPU kernel beside its floor and its peers.

    ptq kernels --table --peers --markdown gpu.md
    ptq kernels w4a16 w8a8 --shapes 4096x4096 --rows 1 64

The floor is the larger of two times: bytes over the nominal bandwidth of the device, or that of a
large copy where the device is not known, and products at what a large bf16 GEMM of torch reaches in
the same run, those of 8 bits twice as fast. Inputs come quantized; what that adds to the op before
(SwiGLU's product before 4096x14336, the norm before others) stands in a column of its own. Peers
are what stock torch has (`kernels.bench.torch_peers`); times of all are those of CUDA-graph replays
with arguments rotated past the L2 cache. `_g64` behind a family stands for groups of 64, `_zeros`
for zero points, `w4a8_two_level` for scales of two levels. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kernels.bench.peer_times import Peers
from kernels.bench.shapes import FAMILIES, TABLE, Gemm, count, layer
from kernels.bench.timing import timed
from kernels.devices import run_on_gpu

if TYPE_CHECKING:  # the rest needs Triton, and its absence is told
    from kernels.bench.problems import Problem

NOMINAL = {  # bytes a microsecond; others of these generations have other memory
    "NVIDIA A100-SXM4-80GB": 2.04e6,
    "NVIDIA H100 80GB HBM3": 3.35e6,
    "NVIDIA H200": 4.8e6,
}


@dataclass(frozen=True)
class Limits:
    """What the device does at most.

    Attributes:
        device: Its name.
        bandwidth: Bytes a microsecond, nominal where the device is known.
        copied: Bytes read and written a microsecond by a large copy.
        rate: Sums and products of 16 bits a microsecond in a large GEMM.
    """

    device: str
    bandwidth: float
    copied: float
    rate: float

    def floor(self, nbytes: float, operations: float) -> float:
        """Microseconds that no kernel can beat."""
        return max(nbytes / self.bandwidth, operations / self.rate)


@dataclass(frozen=True)
class Row:
    """One kernel on one shape; microseconds.

    Attributes:
        error: Distance from the twin, relative.
        added: What quantization of the inputs adds to the op before, if they are quantized.
        peers: Times by name.
    """

    family: str
    name: str
    us: float
    floor: float
    error: float
    added: float | None = None
    peers: dict[str, float] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Its columns as text, see `HEADER`."""
        best = min(self.peers, key=lambda name: self.peers[name], default=None)
        against = ["-"] * 3
        if best is not None:
            us = self.peers[best]
            against = [f"{us:.2f}", f"{us / self.us:.2f}", best]
        added = "-" if self.added is None else f"{self.added:.2f}"
        own = [f"{self.us:.2f}", f"{self.floor:.2f}", f"{self.floor / self.us:.0%}"]
        return [self.name, *own, f"{self.error:.1e}", added, *against]


HEADER = ["", "us", "floor", "of it", "error", "+ quant", "best peer", "ratio", "peer"]
WIDTHS = [50, 8, 8, 6, 8, 8, 10, 6]


def line(cells: Sequence[str]) -> str:
    """A line of the printed table."""
    first, *numbers, peer = cells
    padded = (f"{cell:>{width}}" for cell, width in zip(numbers, WIDTHS[1:], strict=True))
    return f"{first:{WIDTHS[0]}} {' '.join(padded)}  {peer}".rstrip()


def markdown(limits: Limits, rows: Sequence[Row], missing: Sequence[str]) -> str:
    """The table in Markdown."""
    lines = [describe(limits), "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {reason}" for reason in missing)]).rstrip() + "\n"


def to_json(limits: Limits, rows: Sequence[Row], peers: Peers | None) -> str:
    """All figures; bytes and operations a microsecond."""
    reasons = {} if peers is None else peers.reasons
    missing = [{"peer": p, "reason": r, "rows": n} for (p, r), n in reasons.items()]
    data = {"torch": torch.__version__, "limits": asdict(limits), "missing": missing}
    return json.dumps(data | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def describe(limits: Limits) -> str:
    """One line on the device."""
    return (
        f"{limits.device}, torch {torch.__version__}: {limits.bandwidth / 1e6:.2f} TB/s, copy "
        f"{limits.copied / 1e6:.2f} TB/s, bf16 GEMM {limits.rate / 1e6:.0f} TFLOP/s; microseconds"
    )


def reasons_of(peers: Peers) -> list[str]:
    """Why a peer is missing, a line for each reason."""
    return [f"{peer}: {reason} ({n} rows)" for (peer, reason), n in peers.reasons.items()]


def measure_limits() -> Limits:
    """Measure the device."""
    x = torch.randint(-(2**31), 2**31, (1 << 28,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / timed(lambda i: y.copy_(x), 1, repeats=5)
    rows, outputs, inputs = 4096, 28672, 4096
    a, b = (torch.randn(n, inputs, dtype=torch.bfloat16, device="cuda") for n in (rows, outputs))
    rate = 2 * rows * outputs * inputs / timed(lambda i: F.linear(a, b), 1)
    name = torch.cuda.get_device_name()
    return Limits(name, NOMINAL.get(name, copied), copied, rate)


@dataclass
class Bench:
    """A run of the benchmark.

    Attributes:
        limits: The device's.
        peers: What else is measured, or None.
        wrong: Problems whose results were wrong, as told.
    """

    limits: Limits
    peers: Peers | None = None
    wrong: list[str] = field(default_factory=list)
    _before: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def rows(self, problems: Iterable[tuple[str, Problem]]) -> Iterator[Row]:
        """Measure problems, given with their families; wrong ones are noted and left out."""
        for family, problem in problems:
            try:
                yield self.row(family, problem)
            except ValueError as error:
                self.wrong.append(str(error))

    def row(self, family: str, problem: Problem) -> Row:
        """Measure one problem, and its peers.

        Raises:
            ValueError: its result is wrong.
        """
        error, us, shape = problem.check(), problem.time(), problem.shape
        floor = self.limits.floor(problem.nbytes, problem.operations)
        added = None
        if self.peers is not None and isinstance(shape, Gemm) and "a16" not in family:
            added = self.added(shape)
        peers = {} if self.peers is None else self.peers.of(shape)
        return Row(family, problem.name, us, floor, error, added, peers)

    def added(self, shape: Gemm) -> float:
        """What quantization of a layer's inputs adds to the op before."""
        from kernels.bench.cases import before

        kind = shape.family if shape.family.startswith("fp8") else "int8"
        size = shape.rows, shape.inputs, shape.inputs > shape.outputs
        for key, quantized in (((kind, *size), True), (("", *size), False)):
            if key not in self._before:
                self._before[key] = before(shape, quantized).time()
        return self._before[kind, *size] - self._before["", *size]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; families resolved."""
    parser = argparse.ArgumentParser(
        prog="ptq kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; default: all"
    )
    parser.add_argument("--table", action="store_true", help="only the rows that matter most")
    parser.add_argument("--peers", action="store_true", help="measure what torch has, too")
    parser.add_argument("--shapes", type=layer, nargs="+", metavar="NxK", help="of linear layers")
    parser.add_argument("--rows", type=count, nargs="+", metavar="M", help="of linear layers")
    parser.add_argument("--most", type=count, metavar="N", help="problems of a family")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    allowed = tuple(TABLE) if arguments.table else FAMILIES
    unknown = [name for name in arguments.families if name not in allowed]
    if unknown:
        parser.error(f"found family {unknown[0]!r}; allowed are {', '.join(allowed)}")
    arguments.families = arguments.families or allowed
    for path in (arguments.json, arguments.markdown):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}; make it first")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a result was wrong, 2 where there is no GPU to run on."""
    arguments = parse(argv)
    return run_on_gpu(lambda device: measure(arguments, device))


def measure(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print and write what is asked for; 1 where a result was wrong."""
    from kernels.bench.cases import Selection, of_families

    shapes, counts = arguments.shapes, arguments.rows
    selection = Selection(
        arguments.table, shapes and tuple(shapes), counts and tuple(counts), arguments.most
    )
    peers = Peers(device) if arguments.peers else None
    bench = Bench(measure_limits(), peers)
    print(describe(bench.limits), line(HEADER), sep="\n", flush=True)
    rows = []
    try:
        for row in bench.rows(of_families(arguments.families, selection)):
            print(line(row.cells()), flush=True)
            rows.append(row)
    finally:  # what was measured stays if the rest fails
        missing = [] if peers is None else reasons_of(peers)
        if arguments.json is not None:
            arguments.json.write_text(to_json(bench.limits, rows, peers), encoding="utf-8")
        if arguments.markdown is not None:
            arguments.markdown.write_text(markdown(bench.limits, rows, missing), encoding="utf-8")
    print(*(f"- {text}" for text in missing), *(f"WRONG {text}" for text in bench.wrong), sep="\n")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
