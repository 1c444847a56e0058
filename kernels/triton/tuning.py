"""Which tile a kernel runs with: a table of the device, measured offline, or a rule.

`kernels/triton/tuning/<device>.json` is written by `python -m kernels.triton.tune` and read once.
Nothing is measured while a model runs. A table maps family, "N x K" and a bucket of rows to a tile:

    {"w4a16": {"28672x4096": {"16": {"outputs": 256, "rows": 16, "splits": 1, ...}}}}

Rows fall into buckets by powers of two from 16 on, so that one row and sixteen share a tile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("tuning")


@dataclass(frozen=True)
class Tile:
    """How a GEMM y[M, N] = x[M, K] w[N, K]^T is cut.

    Attributes:
        outputs: Output channels of a tile, a multiple of 64.
        rows: Rows of x of a tile.
        splits: Programs that share the inputs of a tile; their sums are added afterwards.
        stages: Depth of the load pipeline.
        warps: Warps of a program.
        persistent: Whether the kernel for many rows (TMA, one program an SM) runs: of W8A8, and of
            4-bit weights on sm_90, where `warps` are those that multiply.
        inputs: Inputs of a step, of 16-bit weights.
    """

    outputs: int
    rows: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    persistent: bool = False
    inputs: int = 128


@dataclass(frozen=True)
class Cut:
    """How decode attention is cut.

    Attributes:
        warps: Of a program.
        splits: Programs that share the pages of a sequence.
        stages: 0 for the kernel with stated layouts, where it can; else the plain one's pipeline.
    """

    warps: int
    splits: int
    stages: int = 0


@dataclass(frozen=True)
class Block:
    """How prefill attention is cut.

    Attributes:
        rows: Of a program: queries times the heads that share a KV head.
        tokens: Of the cache that are taken at once, 16 to 64.
        warps: Of a program.
        stages: 0 for the kernel whose warps have different tasks, where it can, which has 128 rows,
            64 tokens and 12 warps; else the depth of the plain one's load pipeline.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def bucket(rows: int) -> int:
    """The power of two, from 16 on, that a number of rows is rounded up to."""
    return max(16, 1 << (rows - 1).bit_length())


def file_of(device: torch.device) -> Path:
    """Where the table of a device is kept."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return FOLDER / f"{name.replace(' ', '_')}.json"


@cache
def _table(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def gemm_tile(family: str, device: torch.device, rows: int, outputs: int, inputs: int) -> Tile:
    """The tile of a GEMM of a family: measured, else by `rule`."""
    found = measured_tile(family, device, rows, outputs, inputs)
    return found or rule(family, multiprocessors(device), rows, outputs, inputs)


def measured_tile(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int
) -> Tile | None:
    """What the device's table says, if anything."""
    own = _table(file_of(device)).get(family, {}).get(f"{outputs}x{inputs}", {})
    found = own.get(str(bucket(rows)))
    return Tile(**found) if found else None


@cache
def attention_cut(
    device: torch.device, sequences: int, heads: int, pages: int, scales: int = 1
) -> Cut:
    """The cut of decode attention over at most `pages` pages a sequence: measured, else by rule.

    Entries are keyed by sequences * KV heads and by pages, both as powers of two. `scales` is the
    number of dimensions of the cache's scales, 0 for 16 bits.
    """
    key = f"{bucket(sequences * heads)}x{bucket(pages)}"
    family = {0: "attention_16_bits", 3: "attention_per_token"}.get(scales, "attention")
    found = _table(file_of(device)).get(family, {}).get(key)
    if found:
        return Cut(**found)
    wanted = 5 * multiprocessors(device)  # programs that an SM holds at once
    splits = max(1, min(wanted // (sequences * heads), -(-pages // 4), 64))
    return Cut(2, splits) if scales else Cut(4, splits, 3)


@cache
def prefill_block(device: torch.device, rows: int, dim: int, scales: int) -> Block:
    """The block of prefill attention over `rows` queries times query heads.

    Measured (entries are keyed by head size and rows, a power of two), else the larger one that
    gives every SM a program.
    """
    family = "prefill" if scales else "prefill_16_bits"
    found = _table(file_of(device)).get(family, {}).get(f"{dim}x{bucket(rows)}")
    if found:
        return Block(**found)
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return prefill_rule(rows >= 128 * multiprocessors(device), dim, hopper)


def prefill_rule(many: bool, dim: int, hopper: bool) -> Block:
    """The block that fits in registers: mma.sync holds the operands there that wgmma does not."""
    if dim > 128:
        return Block(64, 32, 8, 3)
    tokens = 64 if hopper or dim < 128 else 32
    return Block(128, tokens, 8, 3) if many else Block(64, tokens, 4, 3)


def rule(family: str, processors: int, rows: int, outputs: int, inputs: int) -> Tile:
    """The largest tile that still gives every SM one; a split of the inputs where none does.

    A split keeps at least 8 runs of 128 inputs, since every split costs a pass over the parts.
    """
    if family in ("w8a8",) and rows > 512:
        return Tile(256, 128, stages=3, warps=8, persistent=True)
    if family == "w8a16" and rows > 64:
        return Tile(128 if outputs % 128 == 0 else 64, 64, stages=3)
    if family == "w16a16":
        return _sixteen_bits(processors, rows, outputs, inputs)
    if rows > 64:
        big = outputs % 128 == 0
        return Tile(128 if big else 64, 128, stages=3, warps=8 if big else 4)
    tall = bucket(rows)
    sizes = (256, 128, 64) if tall == 16 and family.startswith("w4") else (128, 64)
    sizes = [size for size in sizes if outputs % size == 0]
    size = next((s for s in sizes if outputs // s >= 0.8 * processors), sizes[-1])
    splits = max(1, min(round(2 * processors / (outputs // size)), inputs // 1024, 8))
    return Tile(size, tall, splits if outputs // size < 0.8 * processors else 1)


def _sixteen_bits(processors: int, rows: int, outputs: int, inputs: int) -> Tile:
    """16-bit weights: steps of 512 bytes where few programs must read everything."""
    if rows > 16:
        return Tile(128 if outputs % 128 == 0 else 64, min(bucket(rows), 64), stages=3)
    few = outputs // 64 <= 0.6 * processors
    splits = max(1, min(processors * 64 // (2 * outputs), inputs // 1024))
    return Tile(64, 16, splits, 5, inputs=256 if few and inputs % 256 == 0 else 128)
