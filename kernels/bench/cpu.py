"""Every op of the CPU beside torch's equivalent and the floor, in turns in one process.

The floor of an op is the larger of two times: its bytes by the read bandwidth, and its operations
by the rate of the multiply instruction that it uses, both measured here in registers and on a
buffer that no cache holds (`csrc/limits.h`). Weights are rotated through copies that together
exceed the caches, as they do in a model. Times are 20th percentiles: on a machine that is shared,
a thread that waits for its core costs a slice of the scheduler, many times what an op takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.ops as ops
from kernels.attention_inputs import KV_BLOCK, AttentionInputs, KVPool
from kernels.cpu import native
from kernels.cpu.structures import FORMATS, STORAGE_NAMES
from kernels.weights import PackedWeight, Weight, pack_float_weight, pack_quantized_weight

CACHES = 96 << 20  # bytes that no cache of a small server holds
SHAPES = ((8192, 2048), (2048, 8192))
ROWS = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Limits:
    """What the machine does at most: bytes/s, and operations/s by the type that is multiplied."""

    bandwidth: float
    rate: dict[str, float]


@dataclass
class Case:
    """An op, with what it reads and does, and what torch has for it.

    Attributes:
        name: Of the op.
        shape: For a person.
        ours: One call.
        peers: Calls of torch's equivalents, by name.
        nbytes: Read and written.
        operations: Multiplications and additions.
        unit: Key of `Limits.rate`.
    """

    name: str
    shape: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    nbytes: int
    operations: int = 0
    unit: str = "f32"
    times: dict[str, list[float]] = field(default_factory=dict)

    def floor(self, limits: Limits) -> float:
        """Seconds that no implementation can beat here."""
        return max(self.nbytes / limits.bandwidth, self.operations / limits.rate[self.unit])


def measure_limits(seconds: float = 0.2) -> Limits:
    """Measure the machine; all threads of torch."""
    loaded, threads = native.loaded(), torch.get_num_threads()
    data = torch.ones(256 << 20, dtype=torch.uint8)
    reads = [_seconds(lambda: loaded.ptq_read(data.data_ptr(), data.nbytes, threads))]
    reads += [
        _seconds(lambda: loaded.ptq_read(data.data_ptr(), data.nbytes, threads)) for _ in range(8)
    ]
    rate = {}
    for unit in ("f32", "int8", "int4"):
        rounds, done, spent = 200_000, 0.0, 0.0
        while spent < seconds:
            start = time.perf_counter()
            done = loaded.ptq_multiply_add(FORMATS[unit], rounds, threads)
            spent = time.perf_counter() - start
            rounds *= 2
        rate[unit] = done / spent
    return Limits(data.nbytes / min(reads), rate)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(case: Case, budget: float = 0.4, least: int = 5) -> None:
    """Call ours and the peers in turns until the time is over; keeps each call's seconds."""
    calls = {"ours": case.ours, **case.peers}
    for name, call in calls.items():
        call()  # warm
        case.times[name] = []
    start = time.perf_counter()
    while len(case.times["ours"]) < least or time.perf_counter() - start < budget:
        for name, call in calls.items():
            case.times[name].append(_seconds(call))


def copies(make: Callable[[], Tensor], nbytes: int) -> Iterator[Tensor]:
    """Copies of a tensor that together exceed the caches, one after another for ever."""
    first = make()
    return cycle([first, *(first.clone() for _ in range(CACHES // max(1, nbytes)))])


def linear_cases(shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> Iterator[Case]:
    """Linear layers of every scheme."""
    for outputs, inputs in shapes:
        w = torch.randn(outputs, inputs) * 0.02
        q8 = (w * 1000).round().clamp(-127, 127).to(torch.int8)
        q4 = (w * 100).round().clamp(-8, 7).to(torch.int8)
        one, grouped = torch.full((outputs, 1), 1e-3), torch.full((outputs, inputs // 128), 2**-7)
        packed = {
            "a8w8": _packed(q8, "int8", one),
            "a8w4 g128": _packed(q4, "int4", grouped, 128),
            "w8": _packed(q8, "int8", one),
            "w4 g128": _packed(q4, "int4", grouped, 128),
            "fp8": _packed(w.to(torch.float8_e4m3fn), "fp8_e4m3", one),
            "bf16": _rotated(pack_float_weight(w.bfloat16())),
        }
        peers = _torch_linears(w, q8, q4)
        for count in rows:
            x = torch.randn(count, inputs)
            for scheme, weights in packed.items():
                yield _linear_case(scheme, weights, peers.get(scheme, {}), x, (outputs, inputs))


def _packed(
    q: Tensor, dtype: str, scale: Tensor, group: int | None = None
) -> Iterator[PackedWeight]:
    return _rotated(pack_quantized_weight(q, scale, dtype, None, group))


def _rotated(weight: Weight) -> Iterator[PackedWeight]:
    assert isinstance(weight, PackedWeight)
    many = [weight]
    for _ in range(CACHES // weight.nbytes):
        other = native.aligned(weight.nbytes)
        many.append(PackedWeight(other.copy_(weight.packed), weight.outputs))
    return cycle(many)


def _linear_case(
    scheme: str,
    weights: Iterator[PackedWeight],
    peers: Mapping[str, Callable[[Tensor], object]],
    x: Tensor,
    shape: tuple[int, int],
) -> Case:
    count, inputs = x.shape
    integer = scheme.startswith("a8")

    def ours() -> Tensor:
        weight = next(weights)
        if not integer:
            return ops.linear(x, weight)
        xq, scale = ops.quantize_per_token(x)
        return ops.linear(xq, weight, scale)

    nbytes = next(weights).nbytes + x.nbytes + count * shape[0] * 4
    unit = "f32" if not integer else "int4" if "w4" in scheme else "int8"
    named = {name: (lambda call=call: call(x)) for name, call in peers.items()}
    label = f"{count} x {inputs} -> {shape[0]}"
    return Case(f"linear {scheme}", label, ours, named, nbytes, 2 * count * inputs * shape[0], unit)


def _torch_linears(
    w: Tensor, q8: Tensor, q4: Tensor
) -> dict[str, dict[str, Callable[[Tensor], Tensor]]]:
    """What torch has for each scheme on a CPU; inputs are float, and what an op needs is made."""
    outputs, inputs = w.shape
    wide = copies(lambda: w.bfloat16(), 2 * w.numel())
    eight = copies(lambda: q8, w.numel())
    nibbles = (q4[:, ::2] + 8) | ((q4[:, 1::2] + 8) << 4)
    four = torch.ops.aten._convert_weight_to_int4pack_for_cpu((q4 + 8).int(), 1)
    fours = copies(lambda: four, nibbles.numel())
    scales = torch.full((outputs,), 1e-3, dtype=torch.bfloat16)
    affine = torch.full((inputs // 128, outputs, 2), 2**-7, dtype=torch.bfloat16)
    float_bf16 = {"F.linear bf16": lambda x: F.linear(x.bfloat16(), next(wide))}

    def int_mm(x: Tensor) -> Tensor:
        xq, scale = ops.quantize_per_token(x)
        return torch.ops.aten._int_mm(xq, next(eight).t()) * scale * 1e-3

    int4 = {
        "int4pack_mm": lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), next(fours), 128, affine
        )
    }
    return {
        "a8w8": {"_int_mm": int_mm} | float_bf16,
        "a8w4 g128": int4,
        "w8": {
            "int8pack_mm": lambda x: torch.ops.aten._weight_int8pack_mm(
                x.bfloat16(), next(eight), scales
            )
        },
        "w4 g128": int4,
        "fp8": float_bf16,
        "bf16": float_bf16 | {"F.linear fp32": lambda x, held=w: F.linear(x, held)},
    }


def attention_cases(contexts: Sequence[int], heads: int = 32, kv: int = 8) -> Iterator[Case]:
    """One decoded token over a paged cache of each type; torch's is given a contiguous one."""
    dim = 64
    for context in contexts:
        blocks = context // KV_BLOCK
        q = torch.randn(1, heads, dim)
        k = torch.randn(1, kv, context, dim)
        grouped = q.view(1, kv, heads // kv, dim)
        peers = {
            f"sdpa {name}": partial(
                F.scaled_dot_product_attention, grouped.to(kind), k.to(kind), k.to(kind)
            )
            for name, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        }
        table = torch.randperm(blocks)[None]
        start, length = torch.tensor([0, 1]), torch.tensor([context])
        for kind in (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
            pool = (torch.randn(blocks, kv, KV_BLOCK, dim) * 20).to(kind)
            scale = None if kind in (torch.bfloat16, torch.float32) else torch.full((kv,), 0.05)
            rest = (table, length, start, dim**-0.5)
            inputs = cycle(
                [
                    AttentionInputs(KVPool(pool, pool.clone(), scale, scale), *rest)
                    for _ in range(1 + CACHES // (2 * pool.nbytes))
                ]
            )

            def ours(inputs=inputs, q=q) -> Tensor:
                return ops.paged_attention(q, next(inputs))

            operations = 4 * heads * dim * context
            name = f"attention {STORAGE_NAMES[kind]}"
            yield Case(name, f"context {context}", ours, peers, 2 * pool.nbytes, operations)


def row_cases(rows: Sequence[int]) -> Iterator[Case]:
    """Norm, activation and quantization of rows."""
    for count in rows:
        x, up = torch.randn(count, 8192), torch.randn(count, 8192)
        weight, shape, nbytes = torch.randn(8192), f"{count} x 8192", 2 * x.nbytes
        yield Case(
            "rms_norm",
            shape,
            lambda x=x, weight=weight: ops.rms_norm(x, weight, 1e-5),
            {"F.rms_norm": lambda x=x, weight=weight: F.rms_norm(x, (8192,), weight, 1e-5)},
            nbytes,
        )
        yield Case(
            "silu_mul",
            shape,
            lambda x=x, up=up: ops.silu_mul(x, up),
            {"F.silu * up": lambda x=x, up=up: F.silu(x) * up},
            nbytes + x.nbytes,
        )
        yield Case(
            "quantize_per_token",
            shape,
            lambda x=x: ops.quantize_per_token(x),
            {
                "plain torch": lambda x=x: (
                    (x / (x.abs().amax(-1, keepdim=True) / 127)).round().char()
                )
            },
            nbytes,
        )


def cases(rows: Sequence[int] = ROWS, contexts: Sequence[int] = (1024, 8192)) -> Iterator[Case]:
    """All of them."""
    yield from linear_cases(SHAPES, rows)
    yield from attention_cases(contexts)
    yield from row_cases((1, 256))


def table(found: Sequence[Case], limits: Limits) -> pd.DataFrame:
    """A row for each op: microseconds, the floor, and torch's fastest equivalent."""
    lines = []
    for case in found:
        times = {name: float(np.quantile(t, 0.2)) for name, t in case.times.items()}
        ours, floor = times.pop("ours"), case.floor(limits)
        best = min(times, key=lambda name: times[name]) if times else ""
        lines.append(
            {
                "op": case.name,
                "shape": case.shape,
                "us": round(ours * 1e6, 1),
                "floor us": round(floor * 1e6, 1),
                "of floor": f"{floor / ours:.0%}",
                "GB/s": round(case.nbytes / ours / 1e9, 1),
                "GOPS": round(case.operations / ours / 1e9) if case.operations else "",
                "torch us": round(times[best] * 1e6, 1) if best else "",
                "torch's op": best,
                "faster": f"{times[best] / ours:.2f}x" if best else "",
            }
        )
    return pd.DataFrame(lines)


def describe(limits: Limits) -> str:
    """One line about the machine."""
    rates = ", ".join(f"{unit} {rate / 1e9:.0f}" for unit, rate in limits.rate.items())
    return (
        f"{native.isa()}, {torch.get_num_threads()} threads: reads {limits.bandwidth / 1e9:.1f} "
        f"GB/s; multiplies and adds in registers, GOPS: {rates}"
    )
