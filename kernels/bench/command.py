"""`ptq bench --kernels` and `ptq bench --tune`: their arguments; what they need is imported after.

Every kernel stands beside its floor: the larger of two times, bytes over the bandwidth of the
device, and products at the rate that it reaches. Each is checked against a twin in fp64, then timed
with arguments that no cache holds (`kernels.bench.case`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.bench import shapes
from kernels.bench.shapes import ALL_REDUCE, ALONE, CPU_FAMILIES, FAMILIES, LINKS, count, layer

KERNELS = """\
Every kernel beside its floor and what torch has for it: the kernels of the GPU where there is one,
else the compiled ops of the CPU.

    ptq bench --kernels --table --peers --markdown kernels.md
    ptq bench --kernels w4a16 w8a8 --shapes 4096x4096 --rows 1 64
    ptq bench --kernels all_reduce --ranks 2
    ptq bench --kernels links

"plain" and "gain" are of the plain Triton kernel where the one that runs has its layouts stated;
"+ quant" is what quantizing the inputs adds to the op before; "published" are times of other
kernels on the same device, measured once (kernels/bench/peers/published_peers.json). The sum over
GPUs of a host with what follows it, all_reduce, is measured alone, by processes that it starts;
links, what it takes from one kernel to the next, alone, too.
"""
TUNE = """\
Measure tiles on this GPU and write the device's table. What it has for other families or shapes is
kept. By default all families run over the shapes of a Llama-3-8B layer:

    ptq bench --tune --families w4a16 w8a8 --shapes 28672x4096 --rows 16 64
"""


def _parser(mode: str, description: str) -> argparse.ArgumentParser:
    form, prog = argparse.RawDescriptionHelpFormatter, f"ptq bench {mode}"
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=form)


def parse_kernels(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `ptq bench --kernels`."""
    parser = _parser("--kernels", KERNELS)
    add = parser.add_argument
    known = f"of a GPU {', '.join(FAMILIES)}; of a CPU {', '.join(CPU_FAMILIES)}"
    known = f"default: all; {known}; of several GPUs {ALL_REDUCE}; alone: {LINKS}"
    add("families", nargs="*", metavar="FAMILY", help=known)
    add("--device", help="cuda or cpu; default: cuda where torch sees a GPU")
    add("--table", action="store_true", help="of a GPU the rows that matter most")
    add("--peers", action="store_true", help="measure torch's too (a CPU's table always does)")
    add("--shapes", type=layer, nargs="+", metavar="NxK", help="of linear layers")
    add("--rows", type=count, nargs="+", metavar="M", help="of linear layers")
    add("--most", type=count, metavar="N", help="cases of a family")
    ranks = "GPUs of all_reduce; default: as many as there are"
    add("--ranks", type=int, choices=shapes.RANKS, help=ranks)
    add("--json", type=Path, metavar="FILE")
    add("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.device not in (None, "cpu", "cuda"):
        parser.error(f"--device: found {arguments.device!r}; allowed are cuda and cpu")
    alone = ALONE.keys() & {*arguments.families}
    for family in alone:
        _check_alone(parser, family, arguments)
    for path in (arguments.json, arguments.markdown):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}; make it first")
    if arguments.device is None:
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.peers |= arguments.device == "cpu"
    if alone:
        return arguments
    if arguments.ranks:
        parser.error(f"--ranks: only {ALL_REDUCE} has ranks; name it as the family")
    of_gpu = tuple(shapes.TABLE) if arguments.table else FAMILIES
    allowed = CPU_FAMILIES if arguments.device == "cpu" else of_gpu
    unknown = [name for name in arguments.families if name not in allowed]
    if unknown:
        where = f"allowed on a {arguments.device}"
        parser.error(f"found family {unknown[0]!r}; {where} are {', '.join(allowed)}")
    arguments.families = tuple(arguments.families) or allowed
    return arguments


def _check_alone(
    parser: argparse.ArgumentParser, family: str, arguments: argparse.Namespace
) -> None:
    """Sums over ranks and links are measured alone and in their own sizes."""
    if len(arguments.families) > 1:
        parser.error(f"found {family} beside other families; it is measured alone")
    if arguments.device == "cpu":
        parser.error(f"--device: found cpu; {family} runs on GPUs")
    takes = " and ".join(f"--{option}" for option in ALONE[family])
    for name in ("table", "peers", "shapes", "rows", "most", "markdown", "ranks"):
        if getattr(arguments, name) and name not in ALONE[family]:
            parser.error(f"--{name}: {family} takes {takes} alone")


def kernels(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a result was wrong, 2 where there is nothing to run."""
    arguments = parse_kernels(argv)
    if ALONE.keys() & {*arguments.families} or arguments.device == "cuda":
        from kernels.devices import run_on_gpu

        return run_on_gpu(lambda device: _measure_on_gpu(arguments, device))
    import torch

    from kernels.bench.measure import measure
    from kernels.cpu import native

    if native.library() is None:
        missing = "there are no compiled kernels to measure; install a C++ compiler (g++)"
        print(f"error: {missing}", file=sys.stderr)
        return 2
    return measure(arguments, torch.device("cpu"))


def _measure_on_gpu(arguments: argparse.Namespace, device: Any) -> int:
    if ALL_REDUCE in arguments.families:
        from kernels.bench import all_reduce  # Triton, which is there on a GPU alone

        return all_reduce.measure(arguments)
    if LINKS in arguments.families:
        from kernels.bench import links  # likewise

        return links.measure(arguments, device)
    from kernels.bench.measure import measure

    return measure(arguments, device)


def parse_tune(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of `ptq bench --tune`."""
    parser = _parser("--tune", TUNE)
    add, sizes, buckets = parser.add_argument, "of linear layers", "buckets of rows"
    add("--families", nargs="+", choices=shapes.TUNED, default=shapes.TUNED)
    add("--shapes", nargs="+", type=layer, default=shapes.SHAPES, metavar="NxK", help=sizes)
    add("--rows", nargs="+", type=count, default=shapes.TUNED_ROWS, metavar="M", help=buckets)
    add("--output", type=Path, help="by default the device's table")
    return parser.parse_args(argv)


def tune(argv: Sequence[str] | None = None) -> int:
    """Measure tiles and write the table; 2 where there is no GPU to run on."""
    arguments = parse_tune(argv)
    import logging

    from kernels.bench.tune import tune_families
    from kernels.devices import run_on_gpu

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_on_gpu(lambda device: tune_families(arguments, device))
