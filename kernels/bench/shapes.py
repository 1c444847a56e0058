"""What GPU benchmarks measure: families, the shapes of a Llama-3-8B, and what a peer must know."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

VARIANTS = ("", "_g64", "_zeros")  # of weights with scales of groups
GROUPED = tuple(base + variant for base in ("w4a16", "w4a8", "w8a16") for variant in VARIANTS)
INTEGERS = ("w4a8_two_level", "w8a8")  # whose sums over all inputs are exact
LAYERS = (*GROUPED, *INTEGERS, "fp8", "fp8_block", "w16a16")
FAMILIES = (*LAYERS, "attention", "prefill", "fused", "sampling")

GATE_UP, DOWN, QKV, OUT = (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)
SHAPES = (GATE_UP, DOWN, QKV, OUT)  # outputs x inputs of a layer's weights
ROWS = (1, 16, 64, 256)
DECODE = ((1, 4096), (16, 4096), (64, 4096), (64, 1024), (8, 32768))  # sequences, context
PREFILL = (((1024,), 1024), ((1024,), 4096), ((1024,) * 8, 1024), ((2048,), 32768))
MIXED = (1,) * 16 + (1024,)

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


@dataclass(frozen=True)
class Gemm:
    """A linear layer of a family: x [rows, inputs] by a weight [outputs, inputs].

    Attributes:
        group: Inputs that share a scale of a 4-bit or 8-bit weight; `inputs` if all do.
        dtype: Of what comes out, and of x where it is not quantized.
    """

    family: str
    rows: int
    outputs: int
    inputs: int
    group: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Attention:
    """Attention over `context` tokens of each sequence, 32 query and 8 KV heads of 128.

    Attributes:
        new: Queries of a sequence, its last tokens; of the first sequence, unless `even`.
        even: Whether all sequences have as many.
    """

    sequences: int
    context: int
    new: int = 1
    even: bool = True
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Traffic:
    """An elementwise kernel that reads and writes so many bytes."""

    nbytes: int


Shape = Gemm | Attention | Traffic


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
    """A number of rows or problems, on a command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 1 on is needed")
    return int(text)
