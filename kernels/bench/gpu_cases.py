"""Linear layers, fused ops on rows and sampling on a GPU, for benchmarks; see `kernels.bench.case`.

Weights of experts are those of a gpt-oss-20b in MXFP4: 32 experts, 4 of which each token goes to.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

import kernels.triton.fused as fused
import kernels.triton.reference as twins
from kernels.bench.case import (
    ELEMENTS,
    FP8,
    BenchCase,
    Numbers,
    copies_of,
    draw_rows,
    draw_weight,
    relative,
)
from kernels.bench.shapes import LAYERS, SMALL_FLOATS, Gemm, Rows, Selection
from kernels.op_inputs import KVPool
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.common import Workspace
from kernels.triton.experts import sort_by_expert
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.fp4 import codes_of_e4m3, pack_fp4
from kernels.triton.linear.fp8_block import pack_fp8_block
from kernels.triton.linear.w4a8 import pack_w4a8
from kernels.triton.linear.w8a8 import pack_w8a8
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import GpuWeight
from kernels.triton.linear.weight_only import pack_w4a16, pack_w8a16
from kernels.triton.sampling.logits import LISTED, Edits
from kernels.triton.sampling.sample import sample
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


"""What makes the cases of a family."""


READ = {"norm": 6, "silu": 4, "quantize": 2}  # bytes of an element; two of norm's are its sum
NAMES = {"norm": "add + norm", "silu": "silu * up", "quantize": "rows"}


def quantized(
    op: str, rows: int, size: int, dtype: torch.dtype = torch.int8, group: int | None = None
) -> BenchCase:
    """An op whose rows come out quantized, or in 16 bits.

    Args:
        op: `norm` (sum and norm), `silu` (SwiGLU's product) or `quantize` (plain rows).
        rows: Of the input.
        size: Elements of a row that comes out.
        dtype: Of what comes out.
        group: Elements that share a scale; None for all of a row.
    """
    copies = copies_of(rows * size * READ[op])
    width = 2 * size if op == "silu" else size
    x, other = (torch.randn(copies, rows, width, device="cuda").bfloat16() for _ in "ab")
    weight = torch.rand(size, device="cuda").bfloat16()

    def run(library: ModuleType, i: int) -> Tensor:
        if op == "norm":
            return library.add_rms_norm(x[i], other[i], weight, 1e-6, None, dtype, group)[0]
        name = "gated_product" if op == "silu" else "quantize_rows"
        return getattr(library, name)(x[i], None, dtype, group)[0]

    nbytes = rows * size * (READ[op] + dtype.itemsize)
    kind = str(dtype)[6:] + (f" by {group}" if group else "")
    return BenchCase(
        f"{NAMES[op]} -> {kind} {rows}x{size}", Rows(op, rows, size, nbytes),
        lambda i, cut: run(fused, i), copies, nbytes,
        lambda y: relative(y, run(twins, 0).double()), 4e-3,
    )  # fmt: skip


def before(shape: Gemm, quantize: bool) -> BenchCase:
    """The op before a layer, which ends in the quantization of its inputs or does not.

    SwiGLU's product before a layer that makes rows shorter, the norm before others.
    """
    dtype, group = torch.bfloat16, None
    if quantize and shape.family.startswith("fp8"):
        dtype, group = FP8, 128 if shape.family == "fp8_block" else None
    elif quantize:
        dtype = torch.int8
    op = "silu" if shape.inputs > shape.outputs else "norm"
    return quantized(op, shape.rows, shape.inputs, dtype, group)


SAMPLINGS = {  # temperature, top_k, top_p, standard deviation of the logits
    "greedy": (0.0, 0, 1.0, 4.0),
    "temperature": (0.8, 0, 1.0, 4.0),
    "top_k 50": (0.8, 50, 1.0, 4.0),
    "top_p 0.9": (0.8, 0, 0.9, 4.0),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, 4.0),
    "top_p 0.9, nearly even": (1.0, 0, 0.9, 0.5),
}
EDITS = ("nothing", "bias", "min_p", "mask", "all")  # of the rows, where the sampler may edit them


def edited_sampling(rows: int, vocabulary: int, kind: str, workspace: Workspace) -> BenchCase:
    """`sampling` with temperature, where each row asks for so much; beside it, `sampling` itself.

    Biases are of 300 tokens and zero, so that a row stays as it is from call to call.
    """
    logits = torch.randn(rows, vocabulary, device="cuda") * 4.0
    seeds, steps = (torch.arange(rows, device="cuda") + i for i in (2**40, 7))
    full = partial(torch.full, (rows,), device="cuda")
    rest = (full(0.8), full(0).int(), full(1.0), seeds, steps)
    least = full(0.05).log() if kind in ("min_p", "all") else full(-torch.inf)
    ids = torch.rand(rows, vocabulary, device="cuda").topk(LISTED).indices.int()
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), device="cuda").int()
    numbers = torch.arange(rows, device="cuda")
    edits = Edits(
        ids, torch.zeros(rows, LISTED, device="cuda"), words, lists=numbers,
        starts=full(0).int(), ends=full(300 if kind in ("bias", "all") else 0).int(),
        mask_rows=numbers.int() if kind in ("mask", "all") else full(-1).int(),
    )  # fmt: skip
    wanted = twins.sample(edits.applied(logits), *rest, least)
    return BenchCase(
        f"sample, edits: {kind} ({rows}, {vocabulary})",
        Rows("sample", rows, vocabulary, logits.nbytes),
        lambda i, cut: sample(logits, *rest, workspace, log_min_p=least, edits=edits), 1,
        logits.nbytes, lambda y: (y != wanted).double().mean().item(), 1e-9,
    )  # fmt: skip


def sampling(rows: int, vocabulary: int, kind: str, workspace: Workspace) -> BenchCase:
    """A token for every row of fp32 logits that the GEMM before has left in L2."""
    temperature, top_k, top_p, deviation = SAMPLINGS[kind]
    logits = torch.randn(rows, vocabulary, device="cuda") * deviation
    each = [torch.full((rows,), x, device="cuda") for x in (temperature, top_k, top_p)]
    seeds, steps = (torch.arange(rows, device="cuda") + i for i in (2**40, 7))
    rest = (each[0], each[1].int(), each[2], seeds, steps)
    wanted = twins.sample(logits, *rest)
    return BenchCase(
        f"sample {kind} ({rows}, {vocabulary})", Rows("sample", rows, vocabulary, logits.nbytes),
        lambda i, cut: sample(logits, *rest, workspace), 1, logits.nbytes,
        lambda y: (y != wanted).double().mean().item(), 1e-9,
    )  # fmt: skip


def rope(rows: int, start: int = 0) -> BenchCase:
    """Rotation, quantization and cache write from a place on, 32 query and 8 KV heads of 128."""
    pages, dim = -(-rows // 64) * 2, 128
    copies = copies_of(rows * 6144 * 2, most=8)
    x = torch.randn(copies, rows, 48, dim, device="cuda").bfloat16()
    angles = (torch.rand(rows, dim // 2, device="cuda") * 6).repeat(1, 2)
    slots = torch.arange(rows, device="cuda") + start
    shapes = ((pages, 8, 64, dim), (pages, 8, dim, 64))
    pools = [torch.zeros(size, dtype=torch.int8, device="cuda") for size in shapes]
    scales = [torch.full((pages, 8, 64), 0.03, device="cuda") for _ in "kv"]
    turns, pool = (angles.cos(), angles.sin()), KVPool(*pools, *scales, dynamic=True)

    def parts(i: int) -> tuple[Tensor, ...]:
        return x[i, :, :32], x[i, :, 32:40], x[i, :, 40:]

    def error(y: Tensor) -> float:
        found = [t.clone() for t in pools]
        count = min(rows, 256)
        few = [t[:count] for t in (*parts(0), *turns)]
        wanted = twins.rope_write(*few, pool, slots[:count])
        off = max((a.int() - b.int()).abs().max().item() for a, b in zip(found, pools, strict=True))
        return relative(y[:count], wanted.double()) if off <= 1 else float("nan")

    nbytes = rows * 6144 * 2 + rows * (8192 + 2048)
    return BenchCase(
        f"rope + quantize + write {rows}{f' from {start} on' if start else ''}",
        Rows("rope", rows, 6144, nbytes),
        lambda i, cut: rope_write(*parts(i), *turns, pool, slots), copies, nbytes, error, 4e-3,
    )  # fmt: skip


def of_fused(_: Workspace, selection: Selection) -> Iterator[BenchCase]:
    """Norm, SwiGLU and rotation, decode and prefill; with float rows, what quantization adds. Of
    the table those of 4096 tokens of 4096."""
    if selection.table:
        for dtype in (torch.int8, FP8):
            yield quantized("norm", 4096, 4096, dtype)
            yield quantized("silu", 4096, 4096, dtype)
        yield quantized("silu", 4096, 14336)
        yield rope(4096)
        return
    for rows in (1, 64, 4096):
        for dtype in (torch.int8, FP8, torch.bfloat16):
            yield quantized("norm", rows, 4096, dtype)
            yield quantized("silu", rows, 14336, dtype)
        for group in (None, 128):
            yield quantized("quantize", rows, 4096, FP8, group)
        yield quantized("norm", rows, 4096, FP8, 128)
        yield quantized("silu", rows, 14336, FP8, 128)
        yield rope(rows)
    yield rope(4096, start=37)


def of_sampling(workspace: Workspace, _: Selection) -> Iterator[BenchCase]:
    """Tokens from the logits of a Llama-3 vocabulary."""
    for rows in (1, 16, 64):
        for kind in SAMPLINGS:
            yield sampling(rows, 128256, kind, workspace)
    for rows in (1, 64, 256):
        yield sampling(rows, 128256, "temperature", workspace)
        for kind in EDITS:
            yield edited_sampling(rows, 128256, kind, workspace)


CASES = {family: partial(of_layers, family) for family in LAYERS}  # what makes those of a family
CASES |= {"experts": of_experts, "fused": of_fused, "sampling": of_sampling}
