"""Linear layers of a mixture's experts on a GPU, for benchmarks; see `kernels.bench.case`.

Weights are MXFP4 of a gpt-oss-20b: 32 experts, 4 of which each token goes to.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import replace

import torch

from kernels.bench.case import BenchCase
from kernels.bench.draw import ELEMENTS, relative
from kernels.bench.shapes import Rows
from kernels.bench.timing import copies_of
from kernels.triton.common import Workspace
from kernels.triton.experts.sorting import sort_by_expert
from kernels.triton.linear.fp4 import pack_fp4
from kernels.triton.tuning import bucket

EXPERTS, CHOSEN = 32, 4


def mxfp4(tokens: int, outputs: int, inputs: int, workspace: Workspace) -> BenchCase:
    """What the experts of so many tokens make of their rows, in bf16."""
    device, size = torch.device("cuda"), (EXPERTS, outputs, inputs)
    codes = torch.randint(0, 16, size, dtype=torch.uint8, device=device)
    scale = torch.exp2(torch.randint(-9, -5, (*size[:2], inputs // 32), device=device).float())
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN).indices.int()
    weight = pack_fp4(codes, scale)
    first = replace(weight, packed=weight.packed[0], scale=weight.scale[0])
    rows = min(bucket(2 * (tokens * CHOSEN // EXPERTS) + 1), 64)
    pairs = replace(sort_by_expert(chosen, EXPERTS, rows), metadata_ready=True)
    half = torch.tensor(ELEMENTS, device=device)
    table = torch.cat((half, -half))
    wanted = torch.empty(tokens * CHOSEN, outputs, device=device, dtype=torch.float64)
    source = torch.arange(tokens * CHOSEN, device=device) // CHOSEN
    for expert in chosen.unique().tolist():
        own = chosen.flatten() == expert
        values = table[codes[expert].int()] * scale[expert].repeat_interleave(32, 1)
        wanted[own] = x[source[own]].double() @ values.double().T
    used = chosen.unique().numel()
    nbytes = weight.nbytes // EXPERTS * used + 2 * (x.numel() + wanted.numel())
    copies = [first]
    for _ in range(copies_of(weight.nbytes // EXPERTS * used) - 1):
        other = replace(weight, packed=weight.packed.clone(), scale=weight.scale.clone())
        copies.append(replace(other, packed=other.packed[0], scale=other.scale[0]))
    return BenchCase(
        f"experts mxfp4 {outputs}x{inputs} T={tokens} of {used} experts",
        Rows("experts", tokens, inputs, nbytes),
        lambda i, tile: copies[i].run(x, None, workspace, x.dtype, pairs, tile), len(copies),
        nbytes, lambda y: relative(y, wanted), 4e-3, 2.0 * tokens * CHOSEN * outputs * inputs,
    )  # fmt: skip
