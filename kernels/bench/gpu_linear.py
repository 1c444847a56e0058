"""Linear layers on a GPU, for benchmarks and tuning; see `kernels.bench.case`.

Weights of experts are those of a gpt-oss-20b in MXFP4: 32 experts, 4 of which each token goes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import BenchCase, copies_of
from kernels.bench.draw import ELEMENTS, FP8, Numbers, draw_rows, draw_weight, relative
from kernels.bench.shapes import LAYERS, SMALL_FLOATS, Gemm, Rows, Selection
from kernels.triton.common import Workspace
from kernels.triton.experts.sorting import sort_by_expert
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.fp4 import codes_of_e4m3, pack_fp4
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w4a16 import pack_w4a16
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w8a16 import pack_w8a16
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import GpuWeight
from kernels.triton.tuning import Tile, bucket_of

PLAIN_FEW = (Tile(128, 64, 1), Tile(64, 64, 2))  # tiles of plain kernels beside the rule's
PLAIN_MANY = (Tile(128, 128, 1, 3, 8), Tile(128, 64, 1))
EXPERTS, CHOSEN = 32, 4
EXPERT_TOKENS = (1, 16, 64, 512)
EXPERT_LAYERS = ((5760, 2880), (2880, 2880))
TOLERANCES = {"fp8": 1e-2, "float16": 1e-3, "bfloat16": 4e-3}


def gemm(
    family: str, rows: int, outputs: int, inputs: int, workspace: Workspace,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchCase:  # fmt: skip
    """A linear layer of a family of `kernels.bench.shapes.LAYERS`; results are in `dtype`."""
    name = str(dtype)[6:]
    shape = Gemm.of(family, rows, outputs, inputs, name)
    numbers = draw_weight(shape, "cuda")
    x, own = draw_rows(shape, "cuda")
    if family == "fp8_block":
        x, own = quantize_rows(torch.randn(rows, inputs, device="cuda"), None, FP8, 128)
    wanted = numbers.product(x, own)
    weights = rotated(pack(shape, numbers))
    wide = "a16" in family
    return BenchCase(
        f"{family} {outputs}x{inputs} M={rows} {name}", shape,
        lambda i, tile: weights[i].run(x, own, workspace, dtype, tile=tile), len(weights),
        weights[0].nbytes + rows * (inputs * (2 if wide else 1) + outputs * 2),
        lambda y: relative(y, wanted), TOLERANCES["fp8" if family.startswith("fp8") else name],
        2.0 * rows * outputs * inputs, "16 bits" if wide else "8 bits",
        plain_tiles(weights[0], x, dtype),
    )  # fmt: skip


def pack(shape: Gemm, numbers: Numbers) -> GpuWeight:
    """A weight in the layout of its family's kernel."""
    q, scale = numbers.q, numbers.scale
    if scale is None:
        return DenseWeight(q, None)
    if shape.base == "fp8_block":
        return pack_fp8_block(q, scale)
    if shape.base in ("w8a8", "fp8"):
        return pack_w8a8(q, scale[:, 0])
    if shape.base in SMALL_FLOATS:
        unit = None if numbers.unit is None else torch.full_like(scale[:, :1], numbers.unit)
        return pack_fp4(codes_of_e4m3(q), scale, None, getattr(torch, shape.dtype), unit)
    packs = {"w4a16": pack_w4a16, "w4a8": pack_w4a8, "w8a16": pack_w8a16}
    return packs[shape.base.removesuffix("_two_level")](q, scale, None, numbers.zero_point)


def rotated(weight: GpuWeight) -> list[GpuWeight]:
    """Copies of a weight, of which none is in the cache when its turn comes."""

    def copy() -> GpuWeight:
        return replace(weight, **{name: t.clone() for name, t in weight.tensors().items()})

    return [weight, *(copy() for _ in range(copies_of(weight.nbytes) - 1))]


def plain_tiles(weight: GpuWeight, x: Tensor, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles of the plain kernel, where a model runs the one with stated layouts; none elsewhere."""
    own = weight.tile(x, dtype, None)
    if own is None or not own.persistent:
        return ()
    others = PLAIN_MANY if len(x) > 64 else PLAIN_FEW
    fitting = [tile for tile in others if weight.size[0] % tile.outputs == 0]
    return tuple(dict.fromkeys((weight.few_rows_tile(x), *fitting)))


def mxfp4(tokens: int, outputs: int, inputs: int, workspace: Workspace) -> BenchCase:
    """What the experts of so many tokens make of their rows, in bf16."""
    device, size = torch.device("cuda"), (EXPERTS, outputs, inputs)
    codes = torch.randint(0, 16, size, dtype=torch.uint8, device=device)
    scale = torch.exp2(torch.randint(-9, -5, (*size[:2], inputs // 32), device=device).float())
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN).indices.int()
    weight = pack_fp4(codes, scale)
    first = replace(weight, packed=weight.packed[0], scale=weight.scale[0])
    rows = min(bucket_of(first.family, 2 * (tokens * CHOSEN // EXPERTS) + 1), 64)
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


def of_layers(family: str, workspace: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """Linear layers of a family, some rows to many."""
    for outputs, inputs, rows in selection.layers(family):
        both = "a16" in family and rows < 4096 and not selection.table
        for dtype in (torch.bfloat16, *((torch.float16,) if both else ())):
            yield gemm(family, rows, outputs, inputs, workspace, dtype)


def of_experts(workspace: Workspace, _: Selection) -> Iterator[BenchCase]:
    """Layers of experts in MXFP4, few tokens to many."""
    for outputs, inputs in EXPERT_LAYERS:
        for tokens in EXPERT_TOKENS:
            yield mxfp4(tokens, outputs, inputs, workspace)


CASES = {family: partial(of_layers, family) for family in LAYERS} | {"experts": of_experts}
"""What makes the cases of a family."""
