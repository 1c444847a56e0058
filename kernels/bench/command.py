"""`ptq bench --kernels` and `ptq bench --tune`: their arguments; what they need is imported after.

Every kernel stands beside its floor: the larger of two times, bytes over the bandwidth of the
device, and products at the rate that it reaches. Each is checked against a twin in fp64, then timed
with arguments that no cache holds (`kernels.bench.timing`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kernels.bench.shapes import (
    ALL_REDUCE,
    CPU_FAMILIES,
    FAMILIES,
    RANKS,
    SHAPES,
    TABLE,
    TUNED,
    TUNED_ROWS,
    count,
    layer,
)

KERNELS = """\
Every kernel beside its floor and what torch has for it: the kernels of the GPU where there is one,
else the compiled ops of the CPU.

    ptq bench --kernels --table --peers --markdown kernels.md
    ptq bench --kernels w4a16 w8a8 --shapes 4096x4096 --rows 1 64
    ptq bench --kernels all_reduce --ranks 2

"plain" and "gain" are of the plain Triton kernel where the one that runs has its layouts stated;
"+ quant" is what quantizing the inputs adds to the op before; "published" are times of other
kernels on the same device, measured once (kernels/bench/peers/published_peers.json). The sum over
GPUs of a host with what follows it, all_reduce, is measured alone, by processes that it starts.
"""
TUNE = """\
Measure tiles on this GPU and write the device's table. What it has for other families or shapes is
kept. By default all families run over the shapes of a Llama-3-8B layer:

    ptq bench --tune --families w4a16 w8a8 --shapes 28672x4096 --rows 16 64
"""


def _parser(mode: str, description: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    prog = f"ptq bench {mode}"
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=form)


def parse_kernels(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `ptq bench --kernels`."""
    parser = _parser("--kernels", KERNELS)
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help=f"default: all; of a GPU {', '.join(FAMILIES)}; of a CPU {', '.join(CPU_FAMILIES)}; "
        f"of several GPUs {ALL_REDUCE}",
    )
    parser.add_argument("--device", help="cuda or cpu; default: cuda where torch sees a GPU")
    parser.add_argument("--table", action="store_true", help="of a GPU the rows that matter most")
    parser.add_argument(
        "--peers", action="store_true", help="measure torch's too (a CPU's table always does)"
    )
    parser.add_argument("--shapes", type=layer, nargs="+", metavar="NxK", help="of linear layers")
    parser.add_argument("--rows", type=count, nargs="+", metavar="M", help="of linear layers")
    parser.add_argument("--most", type=count, metavar="N", help="cases of a family")
    parser.add_argument(
        "--ranks", type=int, choices=RANKS, help="GPUs of all_reduce; default: as many as there are"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.device not in (None, "cpu", "cuda"):
        parser.error(f"--device: found {arguments.device!r}; allowed are cuda and cpu")
    if ALL_REDUCE in arguments.families:
        _check_ranks(parser, arguments)
    for path in (arguments.json, arguments.markdown):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}; make it first")
    arguments.device = arguments.device or _found_device()
    arguments.peers |= arguments.device == "cpu"
    if ALL_REDUCE in arguments.families:
        return arguments
    if arguments.ranks:
        parser.error(f"--ranks: only {ALL_REDUCE} has ranks; name it as the family")
    allowed = families_of(arguments.device, arguments.table)
    unknown = [name for name in arguments.families if name not in allowed]
    if unknown:
        where = f" on a {arguments.device}"
        parser.error(f"found family {unknown[0]!r}; allowed{where} are {', '.join(allowed)}")
    arguments.families = tuple(arguments.families) or allowed
    return arguments


def _check_ranks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sums over ranks are measured alone and in their own sizes."""
    if len(arguments.families) > 1:
        parser.error(f"found {ALL_REDUCE} beside other families; it is measured alone")
    if arguments.device == "cpu":
        parser.error(f"--device: found cpu; {ALL_REDUCE} runs on GPUs")
    for name in ("table", "peers", "shapes", "rows", "most", "markdown"):
        if getattr(arguments, name):
            parser.error(f"--{name}: {ALL_REDUCE} takes --ranks and --json alone")


def _found_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def families_of(device: str, table: bool) -> tuple[str, ...]:
    """What is measured on a kind of device."""
    if device == "cpu":
        return CPU_FAMILIES
    return tuple(TABLE) if table else FAMILIES


def kernels(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a result was wrong, 2 where there is nothing to run."""
    arguments = parse_kernels(argv)
    if ALL_REDUCE in arguments.families:
        from kernels.devices import run_on_gpu

        return run_on_gpu(lambda device: _measure_sums(arguments))
    from kernels.bench.measure import measure

    if arguments.device == "cuda":
        from kernels.devices import run_on_gpu

        return run_on_gpu(lambda device: measure(arguments, device))
    import torch

    from kernels.cpu import native

    if native.library() is None:
        missing = "there are no compiled kernels to measure; install a C++ compiler (g++)"
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return measure(arguments, torch.device("cpu"))


def _measure_sums(arguments: argparse.Namespace) -> int:
    from kernels.bench.all_reduce import measure  # Triton, which is there on a GPU alone

    return measure(arguments)


def parse_tune(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `ptq bench --tune`."""
    parser = _parser("--tune", TUNE)
    parser.add_argument("--families", nargs="+", choices=TUNED, default=TUNED)
    parser.add_argument(
        "--shapes", nargs="+", type=layer, default=SHAPES, metavar="NxK", help="of linear layers"
    )
    parser.add_argument(
        "--rows", nargs="+", type=count, default=TUNED_ROWS, metavar="M", help="buckets of rows"
    )
    parser.add_argument("--output", type=Path, help="by default the device's table")
    return parser.parse_args(argv)


def tune(argv: Sequence[str] | None = None) -> int:
    """Measure tiles and write the table; 2 where there is no GPU to run on."""
    arguments = parse_tune(argv)
    import logging

    from kernels.bench.tune import tune_families
    from kernels.devices import run_on_gpu

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_on_gpu(lambda device: tune_families(arguments, device))
