"""Measuring tiles on a GPU, and writing the device's table (`ptq bench --tune`).

Every candidate is checked against its twin, then timed as `kernels.bench.case` says. What the
table has for other families or shapes is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from kernels.bench.shapes import DECODE, PREFILL, TUNED_ATTENTION, TUNED_PROMPTS
from kernels.triton import tuning
from kernels.triton.tuning import KVSplit, PrefillTile, Tile, bucket, power_of_two

if TYPE_CHECKING:  # the rest needs Triton, and its absence is reported
    from kernels.bench.case import BenchCase

log = logging.getLogger("ptq.kernels")


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
            fills = fills and programs * size * tall <= tuning.PARTS
            worth = splits == 1 or (fills and rows <= 1024 and inputs // splits >= 512)
            if outputs % size == 0 and worth:
                steps = (256, 128) if family == "fp8" and inputs % 256 == 0 else (128,)
                yield from (Tile(size, tall, splits, stages, warps, inputs=k) for k in steps)
    if family in ("w8a8", "fp8") and rows > 64:
        yield from _whole(family, rows, outputs, inputs)


def _whole(family: str, rows: int, outputs: int, inputs: int) -> Iterator[Tile]:
    """Candidates of the kernel that takes whole tiles of 8-bit weights."""
    from kernels.triton.common import capability
    from kernels.triton.linear.hopper.launch import FAST_INPUTS, many_rows_tiles

    if capability() == 90:
        long = family == "fp8" and inputs > FAST_INPUTS
        yield from (t for t in many_rows_tiles(outputs, long) if rows > t.rows // 2)


def _wide(rows: int, outputs: int, inputs: int) -> Iterator[Tile]:
    """16-bit weights: tiles of 8 to 32 KB, one to three programs an SM."""
    tall = min(bucket(rows), 64)
    kinds = ((64, 256, 5), (64, 128, 5), (64, 128, 4), (64, 64, 5), (128, 128, 3), (128, 64, 5))
    for size, step, stages in kinds:
        for splits in (1, 2, 3, 4):
            few = outputs // size * splits <= 264 or splits == 1
            if outputs % size == 0 and inputs % step == 0 and few:
                yield Tile(size, tall, splits, stages, inputs=step)


def _many_rows(family: str, rows: int, outputs: int, inputs: int) -> Iterator[Tile]:
    """4-bit weights: what the kernel for few rows would take, and tiles of the one for many."""
    yield tuning.gemm_tile(
        family.removesuffix("_many"), torch.device("cuda"), rows, outputs, inputs
    )
    sizes = ((256, 128, 4), (128, 128, 4), (128, 256, 6), (256, 64, 6), (128, 64, 6))
    if family == "w4a8_two_level_many":
        sizes = ((256, 128, 5), (128, 256, 4), (128, 128, 6), (256, 64, 6), (128, 64, 6))
    elif family == "w4a8_many":
        sizes = ((256, 128, 5), (128, 128, 6), (256, 64, 6), (128, 64, 6))
    for size, tall, stages in sizes:
        if outputs % size == 0 and rows > tall // 2 and (rows <= 512 or tall >= 128):
            yield from (Tile(size, tall, splits, stages, 8, True) for splits in (1, 4, 8))


def _sizes(family: str, rows: int) -> tuple[tuple[int, int, int, int], ...]:
    """(outputs, rows, stages, warps) worth trying."""
    tall = tuning.bucket_of(family, rows)
    if tall == tuning.FEWEST:
        return tuple((64, tall, stages, 2) for stages in (3, 4, 5, 6))
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


def cuts(sequences: int, context: int, processors: int) -> Iterator[KVSplit]:
    """Candidates of decode attention: two to twenty warps an SM, and no split; plain and not."""
    for warps in (1, 2, 4):
        for splits in (1, 2, 3, 4, 5, 8, 12, 16, 32):
            work = sequences * 8 * splits * warps / processors
            if context // 64 >= splits * warps and (splits == 1 or 2 <= work <= 20):
                yield KVSplit(warps, splits)
                if warps == 4:
                    yield from (KVSplit(4, splits, stages) for stages in (3, 4))


def blocks() -> Iterator[PrefillTile]:
    """Candidates of prefill attention, heads of 128; the last with warps of different tasks."""
    kinds = ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (256, 32, 16))
    for rows, tokens, warps in kinds:
        yield PrefillTile(rows, tokens, warps, 3)
    yield PrefillTile(128, 64, 4, 0)


def best(case: BenchCase, candidates: Iterator[Any]) -> tuple[Any, float]:
    """The fastest candidate and its microseconds."""
    finals = sorted(case.timed(candidates), key=itemgetter(1))[:4]
    finals = [(candidate, case.time(candidate)) for candidate, _ in finals]
    ranked = sorted(finals, key=itemgetter(1))
    log.info("%s: %s", case.name, "; ".join(f"{c} {us:.2f}" for c, us in ranked))
    return ranked[0]


def runs(family: str) -> bool:
    """Whether the device has the instructions that a family is made of."""
    from kernels.triton.common import capability

    if family.endswith("_many"):
        return capability() == 90
    return family != "fp8" or capability() >= 89


def has_choice(family: str, rows: int) -> bool:
    """Whether a model asks the table: of more rows of 16 bits cuBLAS, of few never "_many"."""
    return rows <= 64 if family == "w16a16" else rows > 32 or not family.endswith("_many")


def tune_families(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure all families that are asked for and run here, and write each into the table."""
    path = arguments.output or tuning.file_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for family in arguments.families:
        if not runs(family):
            log.info("left %s out: this device has none", family)
            continue
        own = table.setdefault(family, {})
        for (*shape, last), case, candidates in entries(family, arguments, device):
            place = own.setdefault(shape[0], {}) if shape else own
            place[last] = asdict(best(case, candidates)[0])
        text = json.dumps(table, indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")  # what is measured stays if the rest fails
        log.info("wrote %s of %s", family, path)
    return 0


def entries(
    family: str, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[tuple[str, ...], BenchCase, Iterator[Any]]]:
    """A family's entries of the table: their keys, what is measured, and the candidates."""
    from kernels.bench import gpu_attention, gpu_cases
    from kernels.triton.common import Workspace

    workspace, processors = Workspace.on(device), tuning.multiprocessors(device)
    dtype = torch.bfloat16 if family.endswith("16_bits") else torch.int8
    if family in TUNED_PROMPTS:
        for new, context in PREFILL:
            case = gpu_attention.prefill(new, context, workspace, dtype)
            yield (f"128x{bucket(32 * sum(new))}",), case, blocks()
    elif family in TUNED_ATTENTION:
        per_token = family.endswith("per_token")
        dtype = torch.uint8 if "int4" in family else dtype
        for sequences, context in DECODE:
            case = gpu_attention.attention(sequences, context, workspace, dtype, per_token)
            key = f"{power_of_two(sequences * 8)}x{bucket(context // 64)}"
            yield (key,), case, cuts(sequences, context, processors)
    else:
        rows_of = {tuning.bucket_of(family, rows): rows for rows in arguments.rows}
        for (outputs, inputs), (own, rows) in itertools.product(arguments.shapes, rows_of.items()):
            if has_choice(family, rows):
                size = (rows, outputs, inputs)
                case = gpu_cases.gemm(family.removesuffix("_many"), *size, workspace)
                yield (f"{outputs}x{inputs}", str(own)), case, tiles(family, *size, processors)
