"""`python -m kernels.triton.tune`: measure tiles on this GPU and write the device's table.

Every candidate is checked against its twin, then timed as `kernels.triton.timing` says. What the
table has for other families or shapes is kept. By default all families run over the shapes of a
Llama-3-8B layer:

    python -m kernels.triton.tune --families w4a16 w8a8 --shapes 28672x4096 --rows 16 64
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from kernels.devices import check_device
from kernels.triton import attention_problems, problems
from kernels.triton.common import Workspace
from kernels.triton.problems import Problem
from kernels.triton.shapes import DECODE, PREFILL, SHAPES
from kernels.triton.tuning import (
    Block,
    Cut,
    Tile,
    bucket,
    file_of,
    gemm_tile,
    multiprocessors,
)

log = logging.getLogger("ptq.kernels")
ATTENTION = ("attention", "attention_per_token", "attention_16_bits")
PROMPTS = ("prefill", "prefill_16_bits")
FAMILIES = (
    "w4a16",
    "w4a8",
    "w4a8_two_level",
    "w4a16_many",
    "w4a8_many",
    "w4a8_two_level_many",
    "w8a16",
    "w8a8",
    "fp8",
    "fp8_block",
    "w16a16",
    *ATTENTION,
    *PROMPTS,
)
ROWS = (16, 64, 256)


def tiles(family: str, rows: int, outputs: int, inputs: int, processors: int) -> Iterator[Tile]:
    """Candidates: sizes that fit in registers, splits that give each SM about one to four."""
    if family.endswith("_many"):
        yield from _many_rows(family, rows, outputs, inputs)
        return
    if family == "w16a16":
        yield from _wide(rows, outputs, inputs)
        return
    for size, tall, stages, warps in _sizes(family, rows):
        for splits in (1, 2, 3, 4, 5, 8) if rows <= 64 else (1, 2, 3):
            programs = outputs // size * -(-rows // tall) * splits
            fills = 0.75 * processors <= programs <= 4.2 * processors
            divides = outputs % size == 0 and inputs // splits >= 512
            if divides and (splits == 1 or (fills and rows <= 1024)):
                yield Tile(size, tall, splits, stages, warps)
    if family == "w8a8" and rows >= 128:
        for size, tall, stages in (
            (256, 128, 3),
            (256, 128, 4),
            (128, 256, 3),
            (128, 256, 4),
            (256, 64, 4),
        ):
            yield Tile(size, tall, 1, stages, 8, True)


def _wide(rows: int, outputs: int, inputs: int) -> Iterator[Tile]:
    """16-bit weights: tiles of 8 to 32 KB, one to three programs an SM."""
    tall = min(bucket(rows), 64)
    for size, step, stages in (
        (64, 256, 5),
        (64, 128, 5),
        (64, 128, 4),
        (64, 64, 5),
        (128, 128, 3),
        (128, 64, 5),
    ):
        for splits in (1, 2, 3, 4):
            few = outputs // size * splits <= 264 or splits == 1
            if outputs % size == 0 and inputs % step == 0 and few:
                yield Tile(size, tall, splits, stages, inputs=step)


def _many_rows(family: str, rows: int, outputs: int, inputs: int) -> Iterator[Tile]:
    """4-bit weights: what the kernel for few rows would take, and tiles of the one for many."""
    yield gemm_tile(family.removesuffix("_many"), torch.device("cuda"), rows, outputs, inputs)
    sizes = ((256, 128, 3), (128, 128, 4), (128, 256, 2), (256, 64, 6), (128, 64, 6))
    if family == "w4a8_two_level_many":
        sizes = ((256, 128, 5), (128, 256, 4), (128, 128, 6), (256, 64, 6), (128, 64, 6))
    elif family == "w4a8_many":
        sizes = ((256, 128, 5), (128, 128, 6), (256, 64, 6), (128, 64, 6))
    for size, tall, stages in sizes:
        if outputs % size == 0 and rows > tall // 2 and (rows <= 512 or tall >= 128):
            yield from (Tile(size, tall, splits, stages, 8, True) for splits in (1, 4, 8))


def _sizes(family: str, rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """(outputs, rows, stages, warps) worth trying."""
    tall = bucket(rows)
    if tall <= 16:
        deep = 5 if family.startswith("w4") else 4
        wide = ((256, tall, deep, 4), (256, tall, 4, 4)) if family.startswith("w4") else ()
        return *wide, (128, tall, deep, 4), (64, tall, deep, 4), (64, tall, 6, 4)
    if tall <= 64:
        return (128, tall, 4, 4), (128, tall, 3, 4), (64, tall, 4, 4)
    small = (128, 128, 3, 8), (128, 128, 4, 8), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 4)
    if family in ("w4a16", "w4a8_two_level", "w8a8"):
        return *small, (128, 256, 3, 8), (256, 128, 3, 8), (64, 256, 3, 4)
    return *small, (256, 64, 3, 8), (64, 128, 3, 4)


def cuts(sequences: int, context: int, processors: int) -> Iterator[Cut]:
    """Candidates of decode attention: two to twenty warps an SM, and no split; plain and not."""
    for warps in (1, 2, 4):
        for splits in (1, 2, 3, 4, 5, 8, 12, 16, 32):
            work = sequences * 8 * splits * warps / processors
            if context // 64 >= splits * warps and (splits == 1 or 2 <= work <= 20):
                yield Cut(warps, splits)
                if warps == 4:
                    yield from (Cut(4, splits, stages) for stages in (3, 4))


def blocks() -> Iterator[Block]:
    """Candidates of prefill attention, heads of 128; the last with warps of different tasks."""
    for rows, tokens, warps in (
        (64, 64, 4),
        (64, 32, 4),
        (128, 64, 8),
        (128, 32, 8),
        (256, 32, 16),
    ):
        yield Block(rows, tokens, warps, 3)
    yield Block(128, 64, 4, 0)


def best(problem: Problem, candidates: Iterator[Any]) -> tuple[Any, float]:
    """The fastest candidate and its microseconds."""
    found = []
    for candidate in candidates:
        try:
            problem.check(candidate)
        except OutOfResources as error:
            log.info("%s %s: %s", problem.name, candidate, error)
            continue
        found.append((candidate, problem.time(candidate)))
    finals = sorted(found, key=lambda entry: entry[1])[:4]
    finals = [(candidate, problem.time(candidate)) for candidate, _ in finals]
    ranked = sorted(finals, key=lambda entry: entry[1])
    log.info("%s: %s", problem.name, "; ".join(f"{c} {us:.2f}" for c, us in ranked))
    return ranked[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    names = [f"{outputs}x{inputs}" for outputs, inputs in SHAPES]
    parser.add_argument("--shapes", nargs="+", default=names, help="outputs x inputs of layers")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="buckets of rows")
    parser.add_argument("--output", type=Path, help="by default the device's table")
    return parser.parse_args()


def main() -> int:
    """Measure and write; 2 where there is no GPU to run on."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _arguments()
    try:
        device = check_device("cuda")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    workspace = Workspace.on(device)
    processors = multiprocessors(device)
    path = arguments.output or file_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for family in arguments.families:
        own = table.setdefault(family, {})
        shapes = [] if family in (*ATTENTION, *PROMPTS) else arguments.shapes
        dtype = torch.bfloat16 if family.endswith("16_bits") else torch.int8
        for new, context in PREFILL if family in PROMPTS else ():
            problem = attention_problems.prefill(new, context, workspace, dtype)
            block, _ = best(problem, blocks())
            own[f"128x{bucket(32 * sum(new))}"] = asdict(block)
        for sequences, context in DECODE if family in ATTENTION else ():
            per_token = family == "attention_per_token"
            problem = attention_problems.attention(sequences, context, workspace, dtype, per_token)
            cut, _ = best(problem, cuts(sequences, context, processors))
            own[f"{bucket(sequences * 8)}x{bucket(context // 64)}"] = asdict(cut)
        rows_of = [n for n in arguments.rows if n <= 64 or family != "w16a16"]  # else cuBLAS
        for shape, rows in itertools.product(shapes, rows_of):
            outputs, inputs = map(int, shape.split("x"))
            problem = problems.gemm(family, rows, outputs, inputs, workspace)
            tile, _ = best(problem, tiles(family, rows, outputs, inputs, processors))
            own.setdefault(shape, {})[str(bucket(rows))] = asdict(tile)
        text = json.dumps(table, indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")  # what is measured stays if the rest fails
        log.info("wrote %s of %s", family, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
