"""`python -m kernels.triton.bench [families]`: every GPU kernel beside the floor of its bytes.

The floor is bytes over the nominal bandwidth of the device, or that of a large copy, measured in
the same run, where the device is not known; of prefill attention, its products at what a large
bf16 GEMM reaches. Families: w4a16, w4a8, w8a16, w8a8, fp8, fp8_block, w16a16, attention, prefill,
fused, sampling; all by default. `_g64` behind one of the first three stands for groups of 64,
`_zeros` for zero points. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from kernels.triton import problems
from kernels.triton.common import Workspace
from kernels.triton.problems import Problem, timed

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
DECODE = ((1, 4096), (16, 4096), (64, 4096), (64, 1024), (8, 32768))
NOMINAL = {"H100": 3.35e6, "H200": 4.8e6, "A100": 2.04e6}  # bytes a microsecond
PREFILL = (((1024,), 1024), ((1024,), 4096), ((1024,) * 8, 1024), ((2048,), 32768))
MIXED = (1,) * 16 + (1024,)
REACHED = 6e8  # operations of 16 bits a microsecond
GROUPED = [base + variant for base in ("w4a16", "w4a8", "w8a16") for variant in problems.VARIANTS]
LAYERS = (*GROUPED, "w8a8", "fp8", "fp8_block", "w16a16")
FAMILIES = (*LAYERS, "attention", "prefill", "fused", "sampling")


def of_gemms(family: str, workspace: Workspace) -> Iterator[Problem]:
    """Linear layers of a family, some rows to many."""
    for outputs, inputs in SHAPES:
        for rows in (1, 16, 64, 256) + ((4096,) if outputs * inputs > 2**25 else ()):
            types = (torch.float16,) if "a16" in family and rows < 4096 else ()
            for dtype in (torch.bfloat16, *types):
                yield problems.gemm(family, rows, outputs, inputs, workspace, dtype)


def of_attention(workspace: Workspace) -> Iterator[Problem]:
    """Decode attention: int8 by head and by token, e4m3."""
    for sequences, context in DECODE:
        yield problems.attention(sequences, context, workspace)
        yield problems.attention(sequences, context, workspace, per_token=True)
        yield problems.attention(sequences, context, workspace, torch.float8_e4m3fn)
        yield problems.attention(sequences, context, workspace, torch.bfloat16)


def of_prefill(workspace: Workspace) -> Iterator[Problem]:
    """Prefill attention: whole prompts, chunks, and one beside decodes."""
    for new, context in (*PREFILL, (MIXED, 4096)):
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
            yield problems.prefill(new, context, workspace, dtype)
        yield problems.prefill(new, context, workspace, per_token=True)


def of_fused() -> Iterator[Problem]:
    """Norm, SwiGLU and rotation, decode and prefill; with float rows, what quantization adds."""
    for rows in (1, 64, 4096):
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
            yield problems.norm(rows, 4096, dtype)
            yield problems.silu(rows, 14336, dtype)
        for group in (None, 128):
            yield problems.rows_of(rows, 4096, torch.float8_e4m3fn, group)
        yield problems.norm(rows, 4096, torch.float8_e4m3fn, 128)
        yield problems.silu(rows, 14336, torch.float8_e4m3fn, 128)
        yield problems.rope(rows)
    yield problems.rope(4096, start=37)


def of_sampling(workspace: Workspace) -> Iterator[Problem]:
    """Tokens from the logits of a Llama-3 vocabulary."""
    for rows in (1, 16, 64):
        for kind in problems.SAMPLINGS:
            yield problems.sampling(rows, 128256, kind, workspace)


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a copy of 1 GiB."""
    x = torch.randint(-(2**31), 2**31, (1 << 28,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda i: y.copy_(x), 1, repeats=5)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all by default")
    families = parser.parse_args().families or FAMILIES
    workspace = Workspace.on("cuda")
    name, copied = torch.cuda.get_device_name(), copy_bandwidth()
    bandwidth = next((b for device, b in NOMINAL.items() if device in name), copied)
    print(f"{name}: {bandwidth / 1e6:.2f} TB/s, copy {copied / 1e6:.2f} TB/s")
    print(f"{'':55} {'us':>8} {'floor':>8} {'of it':>6} {'error':>8}")
    for family in families:
        of_kind = {"attention": of_attention, "prefill": of_prefill, "sampling": of_sampling}
        if family in of_kind:
            rows = of_kind[family](workspace)
        else:
            rows = of_fused() if family == "fused" else of_gemms(family, workspace)
        for problem in rows:
            error = problem.check()
            us = problem.time()
            floor = max(problem.nbytes / bandwidth, problem.operations / REACHED)
            print(f"{problem.name:55} {us:8.2f} {floor:8.2f} {floor / us:6.0%} {error:8.1e}")


if __name__ == "__main__":
    main()
