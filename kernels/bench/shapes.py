"""What `ptq bench --kernels` and `--tune` run on: families, sizes, what a peer must know.

Families of linear layers are named by what is multiplied: `w4a16` has 4-bit weights and inputs in
floats, `w8a8` int8 both. `_g64` after a family stands for groups of 64 inputs, `_zeros` for zero
points, `w4a8_two_level` for scales of two levels, `w4a16_nvfp4` and `w4a16_mxfp4` for e2m1 weights.
Nothing heavy is imported here: a command line is read before torch is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

VARIANTS = ("", "_g64", "_zeros")  # of weights with scales of groups
GROUPED = tuple(base + variant for base in ("w4a16", "w4a8", "w8a16") for variant in VARIANTS)
INTEGERS = ("w4a8_two_level", "w8a8")  # whose sums over all inputs are exact
SMALL_FLOATS = {"w4a16_nvfp4": 16, "w4a16_mxfp4": 32}  # e2m1 weights, that many with one scale
LAYERS = (*GROUPED, *SMALL_FLOATS, *INTEGERS, "fp8", "fp8_block", "w16a16")
FAMILIES = (*LAYERS, "experts", "attention", "prefill", "attention_kinds", "fused", "sampling")
ALL_REDUCE, RANKS = "all_reduce", (2, 4, 8)  # by processes with a GPU each
LINKS = "links"
ALONE = {ALL_REDUCE: ("ranks", "json"), LINKS: ("json",)}  # and the options that they take
CPU_LAYERS = ("w8a8", "w4a8", "w8a16", "w4a16", "fp8", "w16a16")
CPU_FAMILIES = (*CPU_LAYERS, "attention", "fused")

# Of a Llama-3-8B: outputs x inputs of a layer's weights, sequences and context of attention.
GATE_UP, DOWN, QKV, OUT = (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)
SHAPES = (GATE_UP, DOWN, QKV, OUT)
ROWS = (1, 16, 64, 256)
DECODE = ((1, 4096), (8, 4096), (16, 4096), (64, 4096), (64, 1024), (4, 32768), (8, 32768))
PREFILL = (((1024,), 1024), ((1024,), 4096), ((1024,) * 8, 1024), ((2048,), 32768))

TABLE = {  # the rows of `--table`: families, and of linear layers the rows of each shape
    "w4a16": {GATE_UP: (*ROWS, 4096), DOWN: ROWS, QKV: (1, 16), OUT: (1, 16)},
    "w4a8": {GATE_UP: (1, 16, 64, 256, 4096), DOWN: (1, 16)},
    "w4a8_two_level": {GATE_UP: (*ROWS, 4096), DOWN: (1, 16)},
    "w8a8": {GATE_UP: (*ROWS, 4096), DOWN: (1, 16, 64, 4096)},
    "fp8": {GATE_UP: (1, 64, 4096), DOWN: (16,)},
    "fp8_block": {GATE_UP: (1, 64, 4096), DOWN: (16,)},
    "w16a16": {GATE_UP: (1, 16, 64), DOWN: (1, 16), QKV: (1,), OUT: (1,)},
    "attention": {},
    "fused": {},
}

TUNED_ATTENTION = (
    *("attention", "attention_per_token", "attention_16_bits"),
    *("attention_int4", "attention_int4_per_token"),
)
TUNED_PROMPTS = ("prefill", "prefill_16_bits")
TUNED = (  # families of a device's table of tiles; `_many` are kernels of many rows
    *("w4a16", "w4a8", "w4a8_two_level", "w4a16_many", "w4a8_many", "w4a8_two_level_many"),
    *("w8a16", "w8a8", "fp8", "fp8_block", "w16a16"),
    *TUNED_ATTENTION,
    *TUNED_PROMPTS,
)
TUNED_ROWS = (8, 16, 64, 256)


@dataclass(frozen=True)
class Gemm:
    """A linear layer of a family: x [rows, inputs] by a weight [outputs, inputs].

    Attributes:
        group: Inputs that share a scale of a 4-bit or 8-bit weight; `inputs` if all do.
        dtype: torch's name of the type of what comes out, and of x where it is not quantized.
    """

    family: str
    rows: int
    outputs: int
    inputs: int
    group: int
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, family: str, rows: int, outputs: int, inputs: int, dtype: str = "bfloat16") -> Gemm:
        """Of a family, whose name tells the group."""
        grouped = 64 if family.endswith("_g64") else 128
        grouped = SMALL_FLOATS.get(family, grouped)
        whole = not family.startswith("w4") and grouped == 128
        return cls(family, rows, outputs, inputs, inputs if whole else grouped, dtype)

    @property
    def base(self) -> str:
        """The family without its variant."""
        return self.family.removesuffix("_g64").removesuffix("_zeros")


@dataclass(frozen=True)
class AttentionShape:
    """Attention over `context` tokens of each sequence.

    Attributes:
        new: Queries of a sequence, its last tokens; of the first sequence, unless `even`.
        even: Whether all sequences have as many.
        cache: torch's name of the type of the cache.
        kind: What it is called where more than scaled products of what precedes count, or heads
            are of other sizes.
    """

    sequences: int
    context: int
    new: int = 1
    even: bool = True
    cache: str = "int8"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    kind: str = ""


@dataclass(frozen=True)
class Rows:
    """An elementwise op on rows: one of `norm`, `silu`, `quantize`, `rope`, `sample`.

    Attributes:
        nbytes: Read and written.
    """

    op: str
    rows: int
    size: int
    nbytes: int


Shape = Gemm | AttentionShape | Rows


@dataclass(frozen=True)
class Selection:
    """Which cases are made.

    Attributes:
        table: Of a GPU's: only those of `TABLE`, with bf16 out.
        shapes: Of linear layers, outputs x inputs; None for the family's.
        rows: Of linear layers; None for the family's.
        most: Of a family; None for all.
    """

    table: bool = False
    shapes: tuple[tuple[int, int], ...] | None = None
    rows: tuple[int, ...] | None = None
    most: int | None = None

    def layers(self, family: str) -> Iterator[tuple[int, int, int]]:
        """Outputs, inputs and rows of the linear layers of a family."""
        whole = dict.fromkeys(SHAPES, ROWS) | dict.fromkeys((GATE_UP, DOWN), (*ROWS, 4096))
        table = TABLE.get(family, {}) if self.table else whole
        for outputs, inputs in self.shapes or table:
            for rows in self.rows or table.get((outputs, inputs), ROWS):
                yield outputs, inputs, rows


def layer(text: str) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, on a command line."""
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdigit() and inputs.isdigit()):
        raise argparse.ArgumentTypeError(f"found {text!r}; write outputs x inputs, as 4096x14336")
    size = int(outputs), int(inputs)
    if not all(size) or size[0] % 64 or size[1] % 128:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; kernels take multiples of 64 outputs and 128 inputs"
        )
    return size


def count(text: str) -> int:
    """A number of rows or cases, on a command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 1 on is needed")
    return int(text)
