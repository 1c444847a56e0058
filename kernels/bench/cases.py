"""The rows of GPU benchmarks: problems of a family, made one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from kernels.bench import attention_problems, fused_problems, problems
from kernels.bench.problems import FP8, Problem
from kernels.bench.shapes import DECODE, DOWN, GATE_UP, MIXED, PREFILL, ROWS, SHAPES, TABLE, Gemm
from kernels.triton.common import Workspace


@dataclass(frozen=True)
class Selection:
    """Which problems are made.

    Attributes:
        table: Only those of `kernels.bench.shapes.TABLE`, with bf16 out.
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
        table = TABLE.get(family, {}) if self.table else dict.fromkeys(SHAPES, ROWS)
        if not self.table:
            table |= dict.fromkeys((GATE_UP, DOWN), (*ROWS, 4096))
        for outputs, inputs in self.shapes or table:
            for rows in self.rows or table.get((outputs, inputs), ROWS):
                yield outputs, inputs, rows


def of_families(families: Iterable[str], selection: Selection) -> Iterator[tuple[str, Problem]]:
    """The problems of families, each made when the one before is done with."""
    workspace = Workspace.on("cuda")
    for family in families:
        for problem in islice(of_family(family, workspace, selection), selection.most):
            yield family, problem


def of_family(family: str, workspace: Workspace, selection: Selection) -> Iterator[Problem]:
    """The problems of a family."""
    if family == "attention":
        return of_attention(workspace, selection.table)
    if family == "prefill":
        return of_prefill(workspace)
    if family == "fused":
        return of_fused_table() if selection.table else of_fused()
    if family == "sampling":
        return of_sampling(workspace)
    return of_gemms(family, workspace, selection)


def of_gemms(family: str, workspace: Workspace, selection: Selection) -> Iterator[Problem]:
    """Linear layers of a family, some rows to many."""
    for outputs, inputs, rows in selection.layers(family):
        both = "a16" in family and rows < 4096 and not selection.table
        for dtype in (torch.bfloat16, *((torch.float16,) if both else ())):
            yield problems.gemm(family, rows, outputs, inputs, workspace, dtype)


def of_attention(workspace: Workspace, integers: bool = False) -> Iterator[Problem]:
    """Decode attention: int8 by head and by token, e4m3 and bf16."""
    for sequences, context in DECODE:
        yield attention_problems.attention(sequences, context, workspace)
        yield attention_problems.attention(sequences, context, workspace, per_token=True)
        for dtype in () if integers else (FP8, torch.bfloat16):
            yield attention_problems.attention(sequences, context, workspace, dtype)


def of_prefill(workspace: Workspace) -> Iterator[Problem]:
    """Prefill attention: whole prompts, chunks, and one beside decodes."""
    for new, context in (*PREFILL, (MIXED, 4096)):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield attention_problems.prefill(new, context, workspace, dtype)
        yield attention_problems.prefill(new, context, workspace, per_token=True)


def of_fused_table() -> Iterator[Problem]:
    """Norm, SwiGLU and rotation of 4096 tokens of 4096."""
    for dtype in (torch.int8, FP8):
        yield fused_problems.norm(4096, 4096, dtype)
        yield fused_problems.silu(4096, 4096, dtype)
    yield fused_problems.silu(4096, 14336)
    yield fused_problems.rope(4096)


def of_fused() -> Iterator[Problem]:
    """Norm, SwiGLU and rotation, decode and prefill; with float rows, what quantization adds."""
    for rows in (1, 64, 4096):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield fused_problems.norm(rows, 4096, dtype)
            yield fused_problems.silu(rows, 14336, dtype)
        for group in (None, 128):
            yield fused_problems.rows_of(rows, 4096, FP8, group)
        yield fused_problems.norm(rows, 4096, FP8, 128)
        yield fused_problems.silu(rows, 14336, FP8, 128)
        yield fused_problems.rope(rows)
    yield fused_problems.rope(4096, start=37)


def of_sampling(workspace: Workspace) -> Iterator[Problem]:
    """Tokens from the logits of a Llama-3 vocabulary."""
    for rows in (1, 16, 64):
        for kind in fused_problems.SAMPLINGS:
            yield fused_problems.sampling(rows, 128256, kind, workspace)


def before(shape: Gemm, quantized: bool) -> Problem:
    """The op before a layer, that ends in the quantization of its inputs or does not.

    SwiGLU's product before a layer that makes rows shorter, the norm before others.
    """
    dtype, group = torch.bfloat16, None
    if quantized and shape.family.startswith("fp8"):
        dtype, group = FP8, 128 if shape.family == "fp8_block" else None
    elif quantized:
        dtype = torch.int8
    op = fused_problems.silu if shape.inputs > shape.outputs else fused_problems.norm
    return op(shape.rows, shape.inputs, dtype, group)
