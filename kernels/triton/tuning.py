"""Which tile a kernel runs with: a table of the device, measured offline, or a rule.

`kernels/triton/tuning/<device>.json` is written by `ptq bench --tune` and read once.
Nothing is measured while a model runs. What a table lacks is looked up in that of a device of the
same chip (`LIKE`). A table maps family, "N x K" and a bucket of rows to a tile:

    {"w4a16": {"28672x4096": {"16": {"outputs": 256, "rows": 16, "splits": 1, ...}}}}

Rows fall into buckets by powers of two from 16 on, so that one row and sixteen share a tile. Where
weights are unpacked on the way (`fewest_rows`) the first bucket is up to 8 rows, whose tiles single
warps multiply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("tuning")
SPLITS = (2, 3, 4, 6, 8, 12, 16)  # programs that share the pages of a tile of prompts
PARTS = 16 << 20  # partial sums that a workspace holds
FEWEST = 8  # rows, the fewest that tensor cores multiply
LIKE = {  # as many SMs of the same kind, with faster memory
    "NVIDIA_H200": "NVIDIA_H100_80GB_HBM3",
    "NVIDIA_GH200_480GB": "NVIDIA_H100_80GB_HBM3",
    "NVIDIA_GH200_144G_HBM3e": "NVIDIA_H100_80GB_HBM3",
}


@dataclass(frozen=True)
class Tile:
    """How a GEMM y[M, N] = x[M, K] w[N, K]^T is cut.

    Attributes:
        outputs: Output channels of a tile, a multiple of 64.
        rows: Rows of x of a tile.
        splits: Programs that share the inputs of a tile; their sums are added afterwards.
        stages: Depth of the load pipeline; in steps of 64 inputs for W4A16 with `persistent` and
            more than 128 rows, else of 128 or `inputs`.
        warps: Warps of a program.
        persistent: Whether the kernel for many rows (one program an SM) runs, of W8A8 and of 4-bit
            weights on sm_90; `warps` are those that multiply.
        inputs: Inputs of a step, of 16-bit and fp8 weights.
    """

    outputs: int
    rows: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    persistent: bool = False
    inputs: int = 128


@dataclass(frozen=True)
class KVSplit:
    """How decode attention is split among programs.

    Attributes:
        warps: Of a program.
        splits: Programs that share the pages of a sequence.
        stages: 0 for the kernel with stated layouts, where it can; else the plain one's pipeline.
        least: Pages of a sequence that a program takes at least, if there are so many.
    """

    warps: int
    splits: int
    stages: int = 0
    least: int = 1

    def programs(self, pages: int) -> int:
        """Programs among which sequences of up to so many pages are split."""
        return min(self.splits, max(1, -(-pages // self.least)))


@dataclass(frozen=True)
class PrefillTile:
    """What a program of prefill attention takes.

    Attributes:
        rows: Of a program: queries times the heads that share a KV head.
        tokens: Of the cache that are taken at once, 16 to 64.
        warps: Of a program.
        stages: 0 for the kernel whose warps have different tasks, where it can, which has 128 rows,
            64 tokens and 12 warps; else the depth of the plain one's load pipeline.
        splits: Programs that share the pages that a tile's rows see; of the plain kernel.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    splits: int = 1


def bucket(rows: int) -> int:
    """The power of two, from 16 on, that a number of rows is rounded up to."""
    return max(16, power_of_two(rows))


def fewest_rows(family: str) -> int:
    """Rows of the smallest bucket of a family: fewer where weights are unpacked on the way."""
    return FEWEST if family.startswith(("w4", "w8a16")) else 16


def bucket_of(family: str, rows: int) -> int:
    """The bucket of rows of a family of GEMMs."""
    return max(fewest_rows(family), power_of_two(rows))


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def power_at_most(count: int) -> int:
    """The largest power of two that is not larger; 1 for less than one."""
    return 1 << max(count, 1).bit_length() - 1


def halfway(count: int, beyond: int = 32) -> int:
    """The next power of two; beyond a number, or what is halfway to it."""
    power = power_of_two(count)
    return power * 3 // 4 if power > beyond and count <= power * 3 // 4 else power


def file_of(device: torch.device) -> Path:
    """Where the table of a device is kept."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return FOLDER / f"{name.replace(' ', '_')}.json"


@cache
def _table(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 232448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _entry(device: torch.device, family: str, *keys: str) -> dict | None:
    """What the device's table, or else that of one like it, says of a family's problem."""
    path = file_of(device)
    for name in (path.stem, LIKE.get(path.stem)):
        found = _table(path.with_name(f"{name}.json")).get(family, {})
        for key in keys:
            found = found.get(key, {})
        if found:
            return found
    return None


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def gemm_tile(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int, row_tiles: int = 1
) -> Tile:
    """The tile of a GEMM of a family: measured, else by `rule`; of experts' `row_tiles` by rule."""
    found = measured_tile(family, device, rows, outputs, inputs) if row_tiles == 1 else None
    return found or rule(family, multiprocessors(device), rows, outputs, inputs, row_tiles)


def measured_tile(
    family: str, device: torch.device, rows: int, outputs: int, inputs: int
) -> Tile | None:
    """What the device's table says, if anything."""
    found = _entry(device, family, f"{outputs}x{inputs}", str(bucket_of(family, rows)))
    return Tile(**found) if found else None


@cache
def kv_split(
    device: torch.device, sequences: int, heads: int, pages: int, scales: int = 1, dim: int = 128,
    packed: bool = False,
) -> KVSplit:  # fmt: skip
    """The cut of decode attention over at most `pages` pages a sequence: measured, else by rule.

    Entries are keyed by sequences * KV heads and by pages, both as powers of two. `scales` is the
    number of dimensions of the cache's scales, 0 for 16 bits; `packed` says that V is int4. Heads
    of more than 128 channels go by the rule: their pages are twice as large, and fewer programs fit
    on an SM; of more than 256, where a page of K and of V in 16 bits take 128 kB, one, of two pages
    or more. Steps of any number of sequences are cut as the padded ones next to them: each cut is a
    kernel of its own, whose first launch takes half a second.
    """
    items, processors = halfway(sequences) * heads, multiprocessors(device)
    if dim > 256:
        stages = 1 if shared_memory(device) < 200_000 else 3 if scales else 2
        return KVSplit(8, max(1, min(processors // items, -(-pages // 2), 64)), stages)
    if dim > 128:
        wanted = (4 if scales else 3) * processors
        return KVSplit(4, max(1, min(wanted // items, -(-pages // 2), 64)), 3)
    family = {0: "attention_16_bits", 3: "attention_per_token"}.get(scales, "attention")
    if packed:
        family = family.replace("attention", "attention_int4")
    found = _entry(device, family, f"{power_of_two(items)}x{bucket(pages)}")
    if found:
        return KVSplit(**found)
    if scales:
        return kv_rule(processors, items, pages)
    return KVSplit(4, power_at_most(min(5 * processors // items, -(-pages // 4), 64)), 3)


def kv_rule(processors: int, items: int, pages: int) -> KVSplit:
    """The cut of decode attention of 8 or 4 bits over so many pairs of a sequence and a KV head.

    As many warps as all SMs hold at eight each, a power of two a pair, so that runs are of equal
    length; half as many where these would be more than four an SM, of fewer than four pages each.
    On an H200 eight sequences of 4,096 tokens (8 KV heads) take 25.7 us, in ten runs of seven pages
    34.4; four of 32,768 tokens 72.0, in twenty runs 91.4.
    """
    warps = power_at_most(min(8 * processors // items, pages))
    if warps > 16 and pages < 4 * warps and items * warps > 4 * processors:
        warps //= 2
    own = 4 if warps > 16 or warps == 4 else 2  # four take a page each, and nothing is added up
    return KVSplit(own, max(1, warps // own))


@cache
def prefill_tile(
    device: torch.device, rows: int, dim: int, scales: int, pages: int = 1
) -> PrefillTile:
    """The block of prefill attention over `rows` queries times query heads, which see at most
    `pages` pages.

    Measured (entries are keyed by head size and rows, a power of two), else by `prefill_rule`. Rows
    that give half of them none share pages among more programs: two an SM, of 16 pages or more, in
    one of eight numbers, each of which is a kernel of its own.
    """
    family = "prefill" if scales else "prefill_16_bits"
    found = _entry(device, family, f"{dim}x{bucket(rows)}")
    if found:
        return PrefillTile(**found)
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    processors = multiprocessors(device)
    tile = prefill_rule(rows / processors, dim, scales, 10 * major + minor)
    most = min(2 * processors * tile.rows // rows, pages // 16)
    return replace(tile, splits=max((s for s in SPLITS if s <= most), default=tile.splits))


def prefill_rule(share: float, dim: int, scales: int, capability: int) -> PrefillTile:
    """The block for so many rows an SM that fits in registers: mma.sync holds the operands there
    that wgmma does not.

    From Hopper on the tensor cores read them from memory, but those of smaller Blackwells (120). On
    an H100 small blocks that leave an SM room for several took 2 to 30% less time than large ones,
    of 16 bits always, of 8 bits in heads of 64 up to about a thousand rows an SM, there with no
    page on its way while another one is converted.
    """
    if dim > 256:  # 64 queries alone fill most of what smaller GPUs have of shared memory
        if 90 <= capability < 120:
            return PrefillTile(64, 64, 8, 1) if scales else PrefillTile(64, 32, 8, 2)
        return PrefillTile(64, 32, 8, 1) if capability == 80 else PrefillTile(32, 16, 8, 1)
    if dim > 128:
        return PrefillTile(64, 32, 8, 3)
    hopper = 90 <= capability < 100
    tokens = 64 if 90 <= capability < 120 or dim < 128 else 32
    if hopper and not scales:
        return PrefillTile(64, tokens, 4, 2)
    if hopper and dim <= 64:
        return PrefillTile(128, tokens, 8, 1) if share >= 1024 else PrefillTile(64, tokens, 4, 1)
    return PrefillTile(128, tokens, 8, 3) if share >= 128 else PrefillTile(64, tokens, 4, 3)


def rule(
    family: str, processors: int, rows: int, outputs: int, inputs: int, row_tiles: int = 1
) -> Tile:
    """The largest tile that still gives every SM one; a split of the inputs where none does.

    A split keeps at least 8 runs of 128 inputs, since every split costs a pass over the parts. Of
    several row tiles, each with a weight of its own, `rows` and `outputs` are those of each.

    Up to 8 rows take pairs of warps, four programs an SM, less time than groups of four, which wait
    for each other at each step: with one request on an H200 a step of Llama-3-8B's shape 1.94 ms in
    place of 2.19 in `w4c8`, 2.02 of 2.15 with scales of two levels; int8 weights of int8 rows none.
    Weights of fp4, which take more instructions to unpack, take six programs an SM.
    """
    if bucket_of(family, rows) == FEWEST:
        tiles = row_tiles * (outputs // 64)
        each = 6 if family.startswith("w4a16_") else 4
        splits = max(1, min(each * processors // tiles, inputs // 512, 8))
        return Tile(64, FEWEST, splits, 5 if splits == 1 else 4, 2)
    if family == "w8a16" and rows > 64:
        return Tile(128 if outputs % 128 == 0 else 64, 64, stages=3)
    if family == "w16a16":
        return _sixteen_bits(processors, rows, outputs, inputs, row_tiles)
    if rows > 64:
        big = outputs % 128 == 0
        return Tile(128 if big else 64, 128, stages=3, warps=8 if big else 4)
    tall = bucket(rows)
    sizes = (256, 128, 64) if tall == 16 and family.startswith("w4") else (128, 64)
    if family == "w4a16_mxfp4" and tall == 16 and row_tiles > 1:
        sizes = (64,)  # of experts
    sizes = [size for size in sizes if outputs % size == 0]
    size = next((s for s in sizes if row_tiles * outputs // s >= 0.8 * processors), sizes[-1])
    tiles = row_tiles * (outputs // size)
    splits = max(1, min(round(2 * processors / tiles), inputs // 1024, 8))
    return Tile(size, tall, splits if tiles < 0.8 * processors else 1)


def _sixteen_bits(processors: int, rows: int, outputs: int, inputs: int, row_tiles: int) -> Tile:
    """16-bit weights: steps of 512 bytes where few programs must read everything."""
    if rows > 16:
        return Tile(128 if outputs % 128 == 0 else 64, min(bucket(rows), 64), stages=3)
    tiles = row_tiles * (outputs // 64)
    few = tiles <= 0.6 * processors
    splits = max(1, min(processors // (2 * tiles), max(inputs // 1024, min(inputs // 512, 4))))
    return Tile(64, 16, splits, 5, inputs=256 if few else 128)
