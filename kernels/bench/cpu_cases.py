"""The rows of a CPU's table: the compiled ops that a model runs, on all of torch's threads.

Inputs of linear layers come in fp32: where a family multiplies integers, quantizing them is part of
the op, and of the peers that need it. Limits are measured with the instructions that the kernels
use (`kernels/cpu/csrc/limits.h`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kernels.ops as ops
import kernels.reference_attention as reference_attention
from kernels.bench.case import BenchCase, Limits, Numbers, calls, copies_of, draw_weight, relative
from kernels.bench.peers.torch_peers import TORCH_ROWS, OnRows
from kernels.bench.shapes import CPU_LAYERS, AttentionShape, Gemm, Rows, Selection
from kernels.cpu import native
from kernels.cpu.structures import FORMATS
from kernels.cpu.weights import NativeWeight, pack_float_weight, pack_quantized_weight
from kernels.op_inputs import KV_BLOCK, AttentionInputs, KVPool

CPU_SHAPES = ((8192, 2048), (2048, 8192))  # outputs x inputs
CPU_ROWS = (1, 4, 16, 64, 256)
CPU_CONTEXTS = (1024, 8192)
CACHES = ("int4", "int8", "float8_e4m3fn", "bfloat16", "float32")
STORED = {"w8a8": "int8", "w4a8": "int4", "w8a16": "int8", "w4a16": "int4", "fp8": "fp8_e4m3"}
UNITS = {"w8a8": "int8", "w4a8": "int4"}  # whose products are of integers


def of_layers(family: str, selection: Selection) -> Iterator[BenchCase]:
    """Linear layers of a family: with some rows and more, for which the weight is packed once."""
    for size in selection.shapes or CPU_SHAPES:
        numbers = draw_weight(Gemm.of(family, 1, *size), "cpu")
        weights = _rotated(family, numbers, Gemm.of(family, 1, *size).group)
        for rows in selection.rows or CPU_ROWS:
            yield _linear(Gemm.of(family, rows, *size, "float32"), numbers, weights)


def _rotated(family: str, numbers: Numbers, group: int) -> list[NativeWeight]:
    """Copies of a weight that together exceed the caches."""
    if numbers.scale is None:
        first = pack_float_weight(numbers.q)
    else:
        grouped = None if numbers.scale.shape[1] == 1 else group
        first = pack_quantized_weight(numbers.q, numbers.scale, STORED[family], None, grouped)
    assert isinstance(first, NativeWeight)
    copies = range(copies_of(first.nbytes, "cpu") - 1)
    others = [native.aligned(first.nbytes).copy_(first.packed) for _ in copies]
    return [first, *(NativeWeight(packed, first.outputs) for packed in others)]


def _linear(shape: Gemm, numbers: Numbers, weights: list[NativeWeight]) -> BenchCase:
    x, unit = torch.randn(shape.rows, shape.inputs), UNITS.get(shape.family, "f32")

    def call(i: int, _: object) -> Tensor:
        if unit == "f32":
            return ops.linear(x, weights[i])
        xq, scale = ops.quantize_per_token(x)
        return ops.linear(xq, weights[i], scale)

    def error(y: Tensor) -> float:
        inputs = (x, None) if unit == "f32" else ops.quantize_per_token(x)
        return relative(y, numbers.product(*inputs))

    return BenchCase(
        f"{shape.family} {shape.outputs}x{shape.inputs} M={shape.rows}", shape, call, len(weights),
        weights[0].nbytes + x.nbytes + shape.rows * shape.outputs * 4, error, 1e-3,
        2.0 * shape.rows * shape.inputs * shape.outputs, unit, device="cpu",
    )  # fmt: skip


def of_attention(_: Selection) -> Iterator[BenchCase]:
    """Decode attention over caches of all types."""
    yield from (attention(context, kind) for context in CPU_CONTEXTS for kind in CACHES)


def attention(context: int, cache: str) -> BenchCase:
    """One decoded token over a paged cache, 32 query and 8 KV heads of 64."""
    shape = AttentionShape(1, context, cache=cache, dim=64)
    q = torch.randn(1, shape.heads, shape.dim)
    pool = _pool(shape, context // KV_BLOCK)
    table, length = torch.randperm(context // KV_BLOCK)[None], torch.tensor([context])
    rest = (table, length, torch.tensor([0, 1]), shape.dim**-0.5)
    nbytes = pool.nbytes_per_token * context
    inputs = [
        AttentionInputs(replace(pool, k=pool.k.clone(), v=pool.v.clone()), *rest)
        for _ in range(copies_of(nbytes, "cpu"))
    ]
    wanted = reference_attention.paged_attention(q, inputs[0])
    return BenchCase(
        f"attention {shape.cache} context {context}", shape,
        lambda i, _: ops.paged_attention(q, inputs[i]), len(inputs), nbytes,
        lambda y: relative(y, wanted), 1e-3, 4.0 * shape.heads * shape.dim * context, "f32",
        device="cpu",
    )  # fmt: skip


def _pool(shape: AttentionShape, blocks: int) -> KVPool:
    """A cache of some type with random numbers: int4 with scales of tokens, others of heads."""
    places = (blocks, shape.kv_heads, KV_BLOCK)
    if shape.cache == "int4":
        held = torch.randint(0, 256, (*places, shape.dim // 2), dtype=torch.uint8)
        scale = torch.full(places, 0.3, dtype=torch.float16)
        return KVPool(held, held, scale, scale, dynamic=True)
    held = (torch.randn(*places, shape.dim) * 20).to(getattr(torch, shape.cache))
    scale = torch.full((shape.kv_heads,), 0.05) if held.dtype.itemsize == 1 else None
    return KVPool(held, held, scale, scale)


ROW_OPS: dict[str, tuple[OnRows, int]] = {  # and how many tensors [rows, size] are read
    "norm": (lambda x, y, w: ops.rms_norm(x, w, 1e-5), 1),
    "silu": (lambda x, y, w: ops.gated_product(x, y), 2),
    "quantize": (lambda x, y, w: ops.quantize_per_token(x)[0], 1),
}


def of_rows(_: Selection) -> Iterator[BenchCase]:
    """Elementwise ops on one row and on many."""
    yield from (elementwise(op, rows) for rows in (1, 256) for op in ROW_OPS)


def elementwise(op: str, rows: int, size: int = 8192) -> BenchCase:
    """Norm, activation or quantization of rows."""
    x, y, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    run, read = ROW_OPS[op]
    wanted = TORCH_ROWS[op](x.double(), y.double(), weight.double())
    nbytes = (1 + read) * x.nbytes
    return BenchCase(
        f"{op} {rows}x{size}", Rows(op, rows, size, nbytes), lambda i, _: run(x, y, weight), 1,
        nbytes, lambda found: relative(found, wanted), 1e-3, unit="f32", device="cpu",
    )  # fmt: skip


CASES = {family: partial(of_layers, family) for family in CPU_LAYERS}
CASES |= {"attention": of_attention, "fused": of_rows}  # what makes the cases of a family

LEAST = 0.2  # seconds of multiplications that are measured


def measure_limits() -> Limits:
    """Measure the machine: a buffer that no cache holds, and multiplications in registers."""
    data = torch.ones(256 << 20, dtype=torch.uint8)
    read = calls(lambda _: native.call("read", data, data.nbytes), 1)
    bandwidth = data.nbytes / min(read() for _ in range(9))
    rates = {}
    for unit in ("f32", "int8", "int4"):
        rounds, done, spent = 100_000, 0.0, 0.0
        while spent < LEAST:
            rounds *= 2
            start = time.perf_counter()
            done = native.call("multiply_add", FORMATS[unit], rounds)
            spent = time.perf_counter() - start
        rates[unit] = done / spent / 1e6
    text = ", ".join(f"{unit} {rate / 1e3:.0f}" for unit, rate in rates.items())
    reads = f"{torch.get_num_threads()} threads: reads {bandwidth / 1e3:.1f} GB/s"
    note = f"{reads}; multiplies and adds in registers, GOPS: {text}"
    return Limits(str(native.isa()), bandwidth, rates, note)
