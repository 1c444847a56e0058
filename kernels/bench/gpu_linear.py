"""Linear layers on a GPU, for benchmarks and tuning; see `kernels.bench.case`.

Linear layers of a mixture's experts on a GPU, for benchmarks; see `kernels.bench.case`.

Weights are MXFP4 of a gpt-oss-20b: 32 experts, 4 of which each token goes to.

Attention over latents on a GPU, for benchmarks; see `kernels.bench.case`.

Of DeepSeek's sizes: latents of 512 numbers, rotated keys of 64; 16 heads are V2-Lite's, 128 V3's.
The floor of decode is what the cache holds of the sequences, read once: 576 bytes a token in int8,
1152 in 16 bits.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import kernels.triton.reference as twins
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.bench.case import BenchCase
from kernels.bench.draw import ELEMENTS, FP8, Numbers, draw_rows, draw_weight, relative
from kernels.bench.shapes import SMALL_FLOATS, AttentionShape, Gemm, Rows
from kernels.bench.timing import copies_of
from kernels.triton.attention.latent import latent_attention
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
from kernels.triton.tuning import Tile, bucket

PLAIN_FEW = (Tile(128, 64, 1), Tile(64, 64, 2))  # tiles of plain kernels beside the rule's
PLAIN_MANY = (Tile(128, 128, 1, 3, 8), Tile(128, 64, 1))
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


RANK, TURN, SCALE = 512, 64, 192**-0.5
CHECKED = 64  # queries of a prompt that are compared


def cache(pages: int, dtype: torch.dtype, copies: int) -> list[KVPool]:
    """Copies of a pool of latents, random, that share their scales."""

    def random(size: int) -> torch.Tensor:
        shape = (pages, 1, 64, size)
        integers = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return integers if dtype == torch.int8 else integers.to(dtype).mul_(0.015)

    scales = [torch.rand(1, size, device="cuda") * 0.01 + 0.01 for size in (TURN, RANK)]
    pools = [KVPool(random(TURN), random(RANK)) for _ in range(copies)]
    if dtype != torch.int8:
        return pools
    return [replace(pool, k_scale=scales[0], v_scale=scales[1]) for pool in pools]


def latents(
    sequences: int,
    context: int,
    workspace: Workspace,
    dtype: torch.dtype = torch.int8,
    heads: int = 16,
    new: int = 1,
) -> BenchCase:
    """Attention of the last `new` tokens of sequences of equal length."""
    pages, name = sequences * context // 64, str(dtype)[6:]
    nbytes = sequences * context * (RANK + TURN) * dtype.itemsize
    copies = copies_of(nbytes, most=8)
    tables = torch.randperm(pages, device="cuda").to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    starts = None
    if new > 1:
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * new
    q = torch.randn(heads, sequences * new, RANK, device="cuda", dtype=torch.bfloat16)
    q = q.transpose(0, 1) / 8
    rotated = torch.randn(sequences * new, heads, TURN, device="cuda", dtype=torch.bfloat16)
    each = [
        AttentionInputs(pool, tables, lengths, starts, SCALE)
        for pool in cache(pages, dtype, copies)
    ]
    last = min(CHECKED, new)
    ends = AttentionInputs(each[0].pool, tables[-1:], lengths[-1:], torch.tensor([0, last]), SCALE)
    wanted = twins.latent_attention(q[-last:], rotated[-last:], ends)
    seen = sequences * sum(context - i for i in range(new))
    op = "latents" if new == 1 else f"latents, {new} new,"
    return BenchCase(
        f"{op} {heads} heads, {name} ({sequences}, {context})",
        AttentionShape(
            sequences, context, new, True, name, heads, 1, RANK, kind="latents of DeepSeek"
        ),
        lambda i, tiles: latent_attention(q, rotated, each[i], workspace, tiles=tiles),
        copies,
        nbytes,
        lambda y: relative(y[-last:], wanted),
        4e-3,
        2 * seen * heads * (2 * RANK + TURN),
    )
