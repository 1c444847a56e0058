"""The rows of a GPU's table: cases of a family, made one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from kernels.bench import gpu_attention, gpu_latent, gpu_linear, gpu_rows
from kernels.bench.case import BenchCase
from kernels.bench.draw import FP8
from kernels.bench.shapes import (
    DECODE,
    EXPERT_LAYERS,
    EXPERT_TOKENS,
    FEW,
    KINDS_DECODE,
    KINDS_PREFILL,
    MIXED,
    PREFILL,
    Selection,
)
from kernels.triton.common import Workspace


def of_families(families: Iterable[str], selection: Selection) -> Iterator[tuple[str, BenchCase]]:
    """The cases of families, each made when the one before is done with."""
    workspace = Workspace.on("cuda")
    for family in families:
        for case in islice(of_family(family, workspace, selection), selection.most):
            yield family, case


def of_family(family: str, workspace: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """The cases of a family."""
    if family == "attention":
        return of_attention(workspace, selection.table)
    if family == "experts":
        return of_experts(workspace)
    if family == "prefill":
        return of_prefill(workspace)
    if family == "attention_kinds":
        return of_attention_kinds(workspace)
    if family == "fused":
        return of_fused_table() if selection.table else of_fused()
    if family == "sampling":
        return of_sampling(workspace)
    return of_gemms(family, workspace, selection)


def of_gemms(family: str, workspace: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """Linear layers of a family, some rows to many."""
    for outputs, inputs, rows in selection.layers(family):
        both = "a16" in family and rows < 4096 and not selection.table
        for dtype in (torch.bfloat16, *((torch.float16,) if both else ())):
            yield gpu_linear.gemm(family, rows, outputs, inputs, workspace, dtype)


def of_experts(workspace: Workspace) -> Iterator[BenchCase]:
    """Layers of experts in MXFP4, few tokens to many."""
    for outputs, inputs in EXPERT_LAYERS:
        for tokens in EXPERT_TOKENS:
            yield gpu_linear.mxfp4(tokens, outputs, inputs, workspace)


def of_attention(workspace: Workspace, integers: bool = False) -> Iterator[BenchCase]:
    """Decode attention: int8 and int4 by head and by token, and both; e4m3 and bf16."""
    for sequences, context in DECODE:
        for dtype in (torch.int8, torch.uint8):
            for per_token in (False, True):
                yield gpu_attention.attention(sequences, context, workspace, dtype, per_token)
        yield gpu_attention.attention(
            sequences, context, workspace, torch.uint8, True, keys=torch.int8
        )
        for dtype in () if integers else (FP8, torch.bfloat16):
            yield gpu_attention.attention(sequences, context, workspace, dtype)


def of_prefill(workspace: Workspace) -> Iterator[BenchCase]:
    """Prefill attention: whole prompts, chunks, and one beside decodes."""
    for new, context in (*PREFILL, (MIXED, 4096), (FEW, 65536)):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield gpu_attention.prefill(new, context, workspace, dtype)
        for dtype in (torch.int8, torch.uint8):
            yield gpu_attention.prefill(new, context, workspace, dtype, per_token=True)


def of_attention_kinds(workspace: Workspace) -> Iterator[BenchCase]:
    """Heads of other sizes, bounded logits, sinks, windows, latents: decodes, then prompts."""
    for kind in gpu_attention.KINDS:
        for dtype in (torch.int8, torch.bfloat16):
            for sequences, context in KINDS_DECODE:
                yield gpu_attention.attention(sequences, context, workspace, dtype, kind=kind)
            for new, context in KINDS_PREFILL:
                yield gpu_attention.prefill(new, context, workspace, dtype, kind=kind)
    for heads in (16, 128):
        for dtype in (torch.int8, torch.bfloat16):
            for sequences, context in (*KINDS_DECODE, (64, 4096)):
                yield gpu_latent.latents(sequences, context, workspace, dtype, heads)
            yield gpu_latent.latents(1, 4096, workspace, dtype, heads, new=1024)


def of_fused_table() -> Iterator[BenchCase]:
    """Norm, SwiGLU and rotation of 4096 tokens of 4096."""
    for dtype in (torch.int8, FP8):
        yield gpu_rows.quantized("norm", 4096, 4096, dtype)
        yield gpu_rows.quantized("silu", 4096, 4096, dtype)
    yield gpu_rows.quantized("silu", 4096, 14336)
    yield gpu_rows.rope(4096)


def of_fused() -> Iterator[BenchCase]:
    """Norm, SwiGLU and rotation, decode and prefill; with float rows, what quantization adds."""
    for rows in (1, 64, 4096):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield gpu_rows.quantized("norm", rows, 4096, dtype)
            yield gpu_rows.quantized("silu", rows, 14336, dtype)
        for group in (None, 128):
            yield gpu_rows.quantized("quantize", rows, 4096, FP8, group)
        yield gpu_rows.quantized("norm", rows, 4096, FP8, 128)
        yield gpu_rows.quantized("silu", rows, 14336, FP8, 128)
        yield gpu_rows.rope(rows)
    yield gpu_rows.rope(4096, start=37)


def of_sampling(workspace: Workspace) -> Iterator[BenchCase]:
    """Tokens from the logits of a Llama-3 vocabulary."""
    for rows in (1, 16, 64):
        for kind in gpu_rows.SAMPLINGS:
            yield gpu_rows.sampling(rows, 128256, kind, workspace)
    for rows in (1, 64, 256):
        yield gpu_rows.sampling(rows, 128256, "temperature", workspace)
        for kind in gpu_rows.EDITS:
            yield gpu_rows.edited_sampling(rows, 128256, kind, workspace)
