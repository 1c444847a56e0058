"""`ptq bench --steps`: a GPU's table of tokens/s, scheme by scheme, all in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from formats.command import CommandParser, count
from formats.errors import EngineError
from formats.files import replace_file
from inference.bench.shapes import SHAPES, read_scheme, read_shape
from inference.bench.steps_table import Figures, describe, table, to_json

SCHEMES = ("a8w8c8", "fp8_c8", "w4c8", "a8w4c8_two_level", "float")
HELP = """\
Steps of a model of random weights on a GPU, one by one.

    ptq bench --steps --schemes a8w8c8 w4c8 float --batch 1 16 64 --json steps.json

For every scheme and batch: the median step with a cache that holds --context tokens of each
sequence; the same step's CUDA graph alone; what the host does in a step that is not waiting; then a
prefill of 8 prompts of 1024 tokens, the first token of one prompt of 128, and the peak of the GPU's
memory. A scheme that does not fit is told, and the others are measured. Whole requests are measured
by `ptq bench --shape llama-3-8b --scheme a8w8c8 --device cuda`. With --host only what the host does
is measured, with a device that gives fixed tokens at once: without a GPU, of no shape or scheme.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a scheme did not fit."""
    arguments = parser().parse_args(argv)
    if arguments.host:
        return _host(arguments.batch, arguments.context)
    read_shape(arguments.shape)
    for scheme in (*arguments.schemes, *arguments.heads):
        read_scheme(scheme)
    import torch

    from inference.backend import require_device
    from inference.bench.steps import measure

    require_device("cuda")
    device = torch.cuda.get_device_name()
    print(device, flush=True)
    found: list[Figures] = []
    missing: dict[str, str] = {}
    sizes = arguments.batch, arguments.context
    heads: list[str | None] = list(arguments.heads) or [None]
    schemes: list[str] = list(dict.fromkeys(arguments.schemes))
    for scheme, head in product(schemes, heads):
        try:
            found.append(measure(arguments.shape, scheme, *sizes, head, arguments.tensor_parallel))
        except EngineError as error:
            name = scheme if head is None else f"{scheme}, head {head}"
            missing[name] = str(error)
            print(f"{name}: {error}", flush=True)
        else:
            print("\n".join(describe(found[-1])), flush=True)
    print(f"\n{table(found, arguments.context)}")
    if arguments.json is not None:
        text = to_json(device, arguments.shape, arguments.context, found, missing)
        replace_file(arguments.json, text.encode())
    return 1 if missing else 0


def _host(batches: Sequence[int], context: int) -> int:
    """Print what the host takes for a step of each batch."""
    from inference.bench.host import measure_host

    for batch in batches:
        found = measure_host(batch, context)
        print(
            f"host alone, batch {batch:3}: {found.us:6.0f} us a step, "
            f"{found.us_per_sequence:.2f} us a sequence",
            flush=True,
        )
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq bench --steps`."""
    made = CommandParser(
        prog="ptq bench --steps",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--shape", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or the path of a config.json"
    )
    made.add_argument(
        "--schemes", nargs="+", default=SCHEMES, help="presets of recipes, or float for bf16"
    )
    made.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="SCHEME",
        help="measure each scheme with each of these for lm_head, such as float w8",
    )
    made.add_argument("--batch", type=count, nargs="+", default=[1, 16, 64], metavar="N")
    made.add_argument("--context", type=count, default=4048, metavar="TOKENS")
    made.add_argument(
        "--tensor-parallel",
        type=count,
        default=1,
        metavar="N",
        help="cut the model among N GPUs, whose first one is told of",
    )
    made.add_argument("--host", action="store_true", help="the host alone, without a GPU")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return made
