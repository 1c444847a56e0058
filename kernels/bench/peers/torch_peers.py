"""What stock torch offers for the shapes that benchmarks measure, timed as our kernels are.

A peer is a function of a shape: it makes random arguments, rotated as ours are, and gives a call
and what that must come to. Where torch has nothing for the shape it raises `UnavailableError` with
the reason; what torch itself refuses on a device is a reason too. Layers compete with the 16-bit
one as well, since that is what quantization is to beat. Inputs come as ours do: on a GPU quantized,
on a CPU in fp32, so that what a peer needs of them is part of its time. `Peers` checks each and has
it timed in turns with ours, or keeps the reason why it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import kernels.ops as ops
from kernels.bench.case import CLOCKS, FP8, Call, copies_of, draw_rows, integers, relative, rotated
from kernels.bench.shapes import AttentionShape, Gemm, Rows, Shape

BF16 = torch.bfloat16
FEW = 256  # rows that tinygemm is for on a GPU
CHECKED = 512  # outputs, or queries, that are compared
TOLERANCE = 1e-2  # of the norm: results in bf16, sums in an order of their own


class UnavailableError(Exception):
    """Torch has nothing for this shape, on this device."""


Get = Callable[[int], Tensor]


@dataclass(frozen=True)
class Calls:
    """A peer's call.

    Attributes:
        call: call(i) with the i-th set of arguments.
        copies: Sets of arguments.
        error: Distance of the result of call(0) from what is computed in fp64, relative.
    """

    call: Get
    copies: int
    error: Callable[[Tensor], float]


def _calls(call: Get, weights: list[Tensor], x: Tensor, weight: Tensor) -> Calls:
    """Of a layer whose result is x @ weight.T; x [M, K], weight fp64 [some of N, K]."""
    few = weight.shape[0]
    return Calls(call, len(weights), lambda y: relative(y[:, :few], x.double() @ weight.T))


def linear(shape: Gemm, device: torch.device, dtype: torch.dtype | None = None) -> Calls:
    """The float layer, by default in 16 bits, bf16 unless results are fp16: cuBLAS on a GPU."""
    kind = dtype or (BF16 if shape.dtype == "float32" else _type(shape))
    weights = rotated(torch.randn(shape.outputs, shape.inputs, device=device, dtype=kind))
    x = _floats(shape, device)
    few = weights[0][:CHECKED].double()
    return _calls(lambda i: F.linear(x.to(kind), weights[i]), weights, x, few)


fp32_linear = partial(linear, dtype=torch.float32)


def _type(shape: Gemm) -> torch.dtype:
    return getattr(torch, shape.dtype)


def _floats(shape: Gemm, device: torch.device) -> Tensor:
    """Random inputs [M, K] of the type of what comes out."""
    return torch.randn(shape.rows, shape.inputs, device=device, dtype=_type(shape))


def tinygemm(shape: Gemm, device: torch.device) -> Calls:
    """4-bit weights in groups, bf16 scales and zeros: w = (q - 8) scale + zero."""
    if shape.dtype == "float16" or shape.group not in (32, 64, 128, 256):
        raise UnavailableError("it takes bf16 and groups of 32, 64, 128 or 256")
    if shape.rows > FEW and device.type == "cuda":
        raise UnavailableError(f"it is made for few rows; not measured above {FEW}")
    q = torch.randint(0, 16, (shape.outputs, shape.inputs), device=device)
    weights = rotated(_pack_int4(q))
    pairs = torch.rand(shape.inputs // shape.group, shape.outputs, 2, device=device) * 0.01
    pairs = pairs.to(BF16)
    x = _floats(shape, device)
    suffix = "_for_cpu" if device.type == "cpu" else ""
    op = getattr(torch.ops.aten, f"_weight_int4pack_mm{suffix}")
    scale, zero = (
        pairs[:, :CHECKED, i].T.double().repeat_interleave(shape.group, dim=1) for i in (0, 1)
    )
    few = (q[:CHECKED].double() - 8) * scale + zero
    return _calls(lambda i: op(x.to(BF16), weights[i], shape.group, pairs), weights, x, few)


def _pack_int4(q: Tensor) -> Tensor:
    """int [N, K] in 0..15, in the order that tinygemm reads."""
    if q.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
    pairs = ((q[:, ::2] << 4) | q[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)


def int8_pack_mm(shape: Gemm, device: torch.device) -> Calls:
    """8-bit weights with a scale an output, and bf16 inputs."""
    q = integers((shape.outputs, shape.inputs), 8, device)
    weights = rotated(q)
    scale = (torch.rand(shape.outputs, device=device) * 0.01).to(BF16)
    x, op = _floats(shape, device), torch.ops.aten._weight_int8pack_mm
    few = q[:CHECKED].double() * scale[:CHECKED, None].double()
    return _calls(lambda i: op(x.to(BF16), weights[i], scale), weights, x, few)


def int_mm(shape: Gemm, device: torch.device) -> Calls:
    """int8 by int8 to int32, then the scales of rows and columns in two ops."""
    if shape.rows <= 16 and device.type == "cuda":
        raise UnavailableError("it takes more than 16 rows")
    scale = torch.rand(shape.outputs, device=device) * 0.01
    out = torch.empty(shape.rows, shape.outputs, device=device, dtype=_type(shape))
    weights, rows = _eight_bits(shape, device)
    quantized = partial(tuple, rows)
    if shape.dtype == "float32":  # on a CPU, where they are quantized by whoever needs that
        quantized = partial(ops.quantize_per_token, torch.randn(shape.rows, shape.inputs))

    def call(i: int) -> Tensor:
        x, own = quantized()
        return torch.mul(torch.ops.aten._int_mm(x, weights[i].t()) * own, scale, out=out)

    x, own = quantized()
    few = weights[0][:CHECKED].double() * scale[:CHECKED, None].double()
    return _calls(call, weights, x.double() * own.double(), few)


def _eight_bits(shape: Gemm, device: torch.device) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Copies of a random weight [N, K] of e4m3 or int8, and rows [M, K] with their scales."""
    size = (shape.outputs, shape.inputs)
    fp8 = shape.family.startswith("fp8")
    first = torch.randn(size, device=device).to(FP8) if fp8 else integers(size, 8, device)
    x, own = draw_rows(shape, device)
    assert own is not None
    return rotated(first), (x, own)


def scaled_mm(shape: Gemm, device: torch.device) -> Calls:
    """e4m3 by e4m3 with scales of rows and columns."""
    if shape.dtype != "bfloat16":
        raise UnavailableError("with scales of rows its results are bf16")
    weights, (x, own) = _eight_bits(shape, device)
    scale = torch.rand(1, shape.outputs, device=device) * 0.01

    def call(i: int) -> Tensor:
        return torch.ops.aten._scaled_mm(
            x, weights[i].t(), scale_a=own, scale_b=scale, out_dtype=BF16, use_fast_accum=True
        )

    few = weights[0][:CHECKED].double() * scale[0, :CHECKED, None].double()
    return _calls(call, weights, x.double() * own.double(), few)


def scaled_mm_blocks(shape: Gemm, device: torch.device) -> Calls:
    """e4m3 by e4m3, scales of 128 inputs of a row and of 128 x 128 of the weight.

    cuBLASLt wants a run's scales of four rows at a time: rows are padded to fours.
    """
    if not hasattr(F, "scaled_mm"):
        raise UnavailableError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    if shape.outputs % 128 or shape.inputs % 128:
        raise UnavailableError("it takes whole blocks of 128 x 128")
    padded = replace(shape, rows=shape.rows + -shape.rows % 4)
    weights, (x, _) = _eight_bits(padded, device)
    runs = shape.inputs // 128
    own = (torch.rand(runs, padded.rows, device=device) * 0.01).t()
    scale = torch.rand(shape.outputs // 128, runs, device=device) * 0.01
    kinds, plain = F.ScalingType, F.SwizzleType.NO_SWIZZLE

    def call(i: int) -> Tensor:
        return F.scaled_mm(
            x, weights[i].t(), own, kinds.BlockWise1x128, scale.t(), kinds.BlockWise128x128,
            swizzle_a=plain, swizzle_b=plain, output_dtype=_type(shape),
        )  # fmt: skip

    few = weights[0][:CHECKED].double() * _wide(_wide(scale, 1), 0)[:CHECKED].double()
    return _calls(call, weights, x.double() * _wide(own, 1).double(), few)


def _wide(scale: Tensor, dim: int) -> Tensor:
    return scale.repeat_interleave(128, dim=dim)


Build = Callable[[Any, torch.device], Calls]
"""Makes the arguments of a shape on a device."""


class Peer(NamedTuple):
    """A way of torch to compute a shape, and its name for a person."""

    name: str
    build: Build


def sdpa(backend: SDPBackend | None, dtype: torch.dtype = BF16) -> Build:
    """Attention over contiguous K and V of equal lengths, by a backend or torch's choice."""

    def build(shape: AttentionShape, device: torch.device) -> Calls:
        if not shape.even:
            raise UnavailableError("it takes sequences with equal numbers of new tokens")
        size = (shape.sequences, shape.kv_heads, shape.context, shape.dim)
        random = partial(torch.randn, device=device, dtype=dtype)
        k, v = (rotated(random(size), 2, 8) for _ in "kv")
        q = random(shape.sequences, shape.heads, shape.new, shape.dim)
        mask = causal_lower_right(shape.new, shape.context) if shape.new > 1 else None
        chosen = nullcontext if backend is None else partial(sdpa_kernel, backend)
        own, grouped = q, shape.kv_heads < shape.heads
        if device.type == "cpu" and shape.new == 1:  # heads that share K and V, as its queries
            own, grouped = q.view(shape.sequences, shape.kv_heads, -1, shape.dim), False

        def call(i: int) -> Tensor:
            with chosen():
                y = F.scaled_dot_product_attention(own, k[i], v[i], mask, enable_gqa=grouped)
                return y.view(q.shape)

        return Calls(call, len(k), lambda y: relative(*_attended(shape, y, q, k[0], v[0])))

    return build


def _attended(
    shape: AttentionShape, y: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The last queries of the last sequence: as found and in fp64 [H, few, D]."""
    few, each = min(shape.new, CHECKED // 8), shape.heads // shape.kv_heads
    wide = [t[-1].double().repeat_interleave(each, dim=0) for t in (k, v)]
    scores = q[-1, :, -few:].double() @ wide[0].mT * shape.dim**-0.5
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril(shape.context - few)
    scores = scores.masked_fill(~seen, float("-inf"))
    return y[-1, :, -few:], scores.softmax(-1) @ wide[1]


def copy(shape: Rows, device: torch.device) -> Calls:
    """As many bytes, half of them read and half written."""
    copies, half = copies_of(shape.nbytes, device), shape.nbytes // 2
    sources = torch.randint(0, 256, (copies, half), device=device, dtype=torch.uint8)
    targets = torch.zeros_like(sources)
    return Calls(
        lambda i: targets[i].copy_(sources[i]), copies, lambda y: float((y != sources[0]).any())
    )


OnRows = Callable[[Tensor, Tensor, Tensor], Tensor]
TORCH_ROWS: dict[str, OnRows] = {  # of x, y [rows, size] and w [size]
    "norm": lambda x, y, w: F.rms_norm(x, w.shape, w, 1e-5),
    "silu": lambda x, y, w: F.silu(x) * y,
    "quantize": lambda x, y, w: (x / (x.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8),
}


def on_rows(shape: Rows, device: torch.device) -> Calls:
    """An elementwise op, of torch's functions."""
    x, y = (torch.randn(shape.rows, shape.size, device=device) for _ in "xy")
    weight, run = torch.randn(shape.size, device=device), TORCH_ROWS[shape.op]
    wanted = run(x.double(), y.double(), weight.double()).double()
    return Calls(lambda i: run(x, y, weight), 1, lambda found: relative(found, wanted))


LINEAR, INT_MM = Peer("F.linear", linear), Peer("_int_mm", int_mm)
TINYGEMM = Peer("tinygemm", tinygemm)
OF_GEMMS = {
    "cuda": {
        "w4a16": (TINYGEMM, LINEAR),
        "w4a8": (INT_MM, LINEAR),
        "w4a8_two_level": (INT_MM, LINEAR),
        "w8a8": (INT_MM, LINEAR),
        "fp8": (Peer("_scaled_mm", scaled_mm), LINEAR),
        "fp8_block": (Peer("scaled_mm 128", scaled_mm_blocks), LINEAR),
    },
    "cpu": {
        "w4a16": (TINYGEMM,),
        "w4a8": (TINYGEMM,),
        "w8a16": (Peer("int8pack_mm", int8_pack_mm),),
        "w8a8": (INT_MM, LINEAR),
        "w16a16": (LINEAR, Peer("F.linear fp32", fp32_linear)),
    },
}
OF_ATTENTION = {
    "cuda": (
        Peer("flash sdpa", sdpa(SDPBackend.FLASH_ATTENTION)),
        Peer("cudnn sdpa", sdpa(SDPBackend.CUDNN_ATTENTION)),
    ),
    "cpu": (Peer("sdpa bf16", sdpa(None)), Peer("sdpa fp32", sdpa(None, torch.float32))),
}
OF_ROWS = {"cuda": Peer("copy", copy), "cpu": Peer("torch", on_rows)}


def peers_for(shape: Shape, device: torch.device) -> tuple[Peer, ...]:
    """What may compute a shape on a device, the closest relative first."""
    if isinstance(shape, Gemm):
        return OF_GEMMS[device.type].get(shape.base, (LINEAR,))
    if isinstance(shape, AttentionShape):
        return () if shape.kind else OF_ATTENTION[device.type]
    return () if shape.op in ("sample", "experts") else (OF_ROWS[device.type],)


@dataclass
class Peers:
    """Makes the peers of shapes.

    Attributes:
        reasons: Why a peer gives no time, with the number of shapes that it was asked for.
        sample: What gives the microseconds of call(i), i cycling over so many sets of arguments; by
            default the device's clock's.
    """

    device: torch.device
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    sample: Callable[[Call, int], Callable[[], float]] | None = None

    def of(self, shape: Shape) -> dict[str, Callable[[], float]]:
        """What gives the microseconds of those that can, by name."""
        found, sample = {}, self.sample or CLOCKS[self.device.type].sample
        for peer in peers_for(shape, self.device):
            try:
                calls = peer.build(shape, self.device)
                error = calls.error(calls.call(0))
                if not error < TOLERANCE:
                    raise UnavailableError(f"its result is off by {error:.1e}")
                found[peer.name] = sample(calls.call, calls.copies)
            except UnavailableError as missing:
                self.reasons[peer.name, str(missing)] += 1
            except (RuntimeError, ValueError, NotImplementedError) as refused:
                why = f"torch refuses: {' '.join(str(refused).split())[:160]}"
                self.reasons[peer.name, why] += 1
        return found

    def messages(self) -> list[str]:
        """Why peers are missing, a line for each reason."""
        return [f"{peer}: {reason} ({n} rows)" for (peer, reason), n in self.reasons.items()]
