"""What stock torch offers for the shapes that GPU benchmarks measure, timed as our kernels are.

A peer is a function of a shape: it makes random arguments, rotated as ours are, and gives a call
and what that must come to. Where torch has nothing for the shape it raises `UnavailableError` with
the reason; what torch itself refuses on a device is a reason too. All layers compete with the
16-bit one as well, since that is what quantization is to beat. Inputs come quantized, as ours do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels.bench.shapes import Attention, Gemm, Shape, Traffic
from kernels.bench.timing import copies_of, relative

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FEW = 256  # rows that tinygemm is for
CHECKED = 512  # outputs, or queries, that are compared


class UnavailableError(Exception):
    """Torch has nothing for this shape, on this device."""


@dataclass(frozen=True)
class Calls:
    """A peer's call.

    Attributes:
        call: call(i) with the i-th set of arguments.
        copies: Sets of arguments.
        error: Distance of the result of call(0) from what is computed in fp64, relative.
    """

    call: Callable[[int], Tensor]
    copies: int
    error: Callable[[Tensor], float]


@dataclass(frozen=True)
class Peer:
    """A way of torch to compute a shape.

    Attributes:
        name: For a person.
        build: Makes its arguments on a device.
        by_group: Whether it depends on the weight's groups.
    """

    name: str
    build: Callable[[Shape, torch.device], Calls]
    by_group: bool = False


def _calls(call: Callable[[int], Tensor], copies: int, x: Tensor, weight: Tensor) -> Calls:
    """Of a layer whose result is x @ weight.T; x [M, K], weight fp64 [some of N, K]."""
    few = weight.shape[0]
    return Calls(call, copies, lambda y: relative(y[:, :few], x.double() @ weight.T))


def bf16_linear(shape: Shape, device: torch.device) -> Calls:
    """cuBLAS in the type of x, bf16 or fp16."""
    assert isinstance(shape, Gemm)
    size = (shape.outputs, shape.inputs)
    copies = copies_of(2 * math.prod(size))
    weights = [torch.randn(size, device=device, dtype=shape.dtype) for _ in range(copies)]
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=shape.dtype)
    return _calls(lambda i: F.linear(x, weights[i]), copies, x, weights[0][:CHECKED].double())


def tinygemm(shape: Shape, device: torch.device) -> Calls:
    """4-bit weights in groups, bf16 scales and zeros: w = (q - 8) scale + zero."""
    assert isinstance(shape, Gemm)
    if shape.dtype != BF16 or shape.group not in (32, 64, 128, 256):
        raise UnavailableError("it takes bf16 and groups of 32, 64, 128 or 256")
    if shape.rows > FEW:
        raise UnavailableError(f"it is made for few rows; not measured above {FEW}")
    q = torch.randint(0, 16, (shape.outputs, shape.inputs), device=device)
    copies, packed = copies_of(q.numel() / 2), _pack_int4(q)
    weights = [packed.clone() for _ in range(copies)]
    pairs = torch.rand(shape.inputs // shape.group, shape.outputs, 2, device=device) * 0.01
    pairs = pairs.to(BF16)
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=BF16)
    on_cpu = device.type == "cpu"
    op = (
        torch.ops.aten._weight_int4pack_mm_for_cpu if on_cpu else torch.ops.aten._weight_int4pack_mm
    )
    scale, zero = (
        pairs[:, :CHECKED, i].T.double().repeat_interleave(shape.group, dim=1) for i in (0, 1)
    )
    few = (q[:CHECKED].double() - 8) * scale + zero
    return _calls(lambda i: op(x, weights[i], shape.group, pairs), copies, x, few)


def _pack_int4(q: Tensor) -> Tensor:
    """int [N, K] in 0..15, in the order that tinygemm reads."""
    if q.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
    pairs = ((q[:, ::2] << 4) | q[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8)


def int_mm(shape: Shape, device: torch.device) -> Calls:
    """int8 by int8 to int32, then the scales of rows and columns in two ops."""
    assert isinstance(shape, Gemm)
    if shape.rows <= 16:
        raise UnavailableError("it takes more than 16 rows")
    x, weights = _eight_bits(shape, torch.int8, device)
    own = torch.rand(shape.rows, 1, device=device) * 0.01
    scale = torch.rand(shape.outputs, device=device) * 0.01
    out = torch.empty(shape.rows, shape.outputs, device=device, dtype=shape.dtype)

    def call(i: int) -> Tensor:
        return torch.mul(torch.ops.aten._int_mm(x, weights[i].t()) * own, scale, out=out)

    few = weights[0][:CHECKED].double() * scale[:CHECKED, None].double()
    return _calls(call, len(weights), x.double() * own.double(), few)


def _eight_bits(
    shape: Gemm, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Random x [M, K] and copies of a weight [N, K]."""

    def random(*size: int) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, size, device=device, dtype=torch.int8)
        return torch.randn(size, device=device).to(dtype)

    copies = copies_of(shape.outputs * shape.inputs)
    weights = [random(shape.outputs, shape.inputs) for _ in range(copies)]
    return random(shape.rows, shape.inputs), weights


def scaled_mm(shape: Shape, device: torch.device) -> Calls:
    """e4m3 by e4m3 with scales of rows and columns."""
    assert isinstance(shape, Gemm)
    if shape.dtype != BF16:
        raise UnavailableError("with scales of rows its results are bf16")
    x, weights = _eight_bits(shape, FP8, device)
    own = torch.rand(shape.rows, 1, device=device) * 0.01
    scale = torch.rand(1, shape.outputs, device=device) * 0.01

    def call(i: int) -> Tensor:
        return torch.ops.aten._scaled_mm(
            x, weights[i].t(), scale_a=own, scale_b=scale, out_dtype=BF16, use_fast_accum=True
        )

    few = weights[0][:CHECKED].double() * scale[0, :CHECKED, None].double()
    return _calls(call, len(weights), x.double() * own.double(), few)


def scaled_mm_blocks(shape: Shape, device: torch.device) -> Calls:
    """e4m3 by e4m3, scales of 128 inputs of a row and of 128 x 128 of the weight.

    cuBLASLt wants a run's scales of four rows at a time: rows are padded to fours.
    """
    assert isinstance(shape, Gemm)
    if not hasattr(F, "scaled_mm"):
        raise UnavailableError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    if shape.outputs % 128 or shape.inputs % 128:
        raise UnavailableError("it takes whole blocks of 128 x 128")
    padded = replace(shape, rows=shape.rows + -shape.rows % 4)
    x, weights = _eight_bits(padded, FP8, device)
    runs = shape.inputs // 128
    own = (torch.rand(runs, padded.rows, device=device) * 0.01).t()
    scale = torch.rand(shape.outputs // 128, runs, device=device) * 0.01
    kinds, plain = F.ScalingType, F.SwizzleType.NO_SWIZZLE

    def call(i: int) -> Tensor:
        return F.scaled_mm(
            x, weights[i].t(), own, kinds.BlockWise1x128, scale.t(), kinds.BlockWise128x128,
            swizzle_a=plain, swizzle_b=plain, output_dtype=shape.dtype,
        )  # fmt: skip

    few = weights[0][:CHECKED].double() * _wide(_wide(scale, 1), 0)[:CHECKED].double()
    return _calls(call, len(weights), x.double() * _wide(own, 1).double(), few)


def _wide(scale: Tensor, dim: int) -> Tensor:
    return scale.repeat_interleave(128, dim=dim)


def sdpa(backend: SDPBackend) -> Callable[[Shape, torch.device], Calls]:
    """Attention in bf16 over contiguous K and V of equal lengths."""

    def build(shape: Shape, device: torch.device) -> Calls:
        assert isinstance(shape, Attention)
        if not shape.even:
            raise UnavailableError("it takes sequences with equal numbers of new tokens")
        size = (shape.sequences, shape.kv_heads, shape.context, shape.dim)
        copies = copies_of(4 * math.prod(size), 8)
        pools = [
            [torch.randn(size, device=device, dtype=BF16) for _ in "kv"] for _ in range(copies)
        ]
        q = torch.randn(
            shape.sequences, shape.heads, shape.new, shape.dim, device=device, dtype=BF16
        )
        mask = causal_lower_right(shape.new, shape.context) if shape.new > 1 else None

        def call(i: int) -> Tensor:
            with sdpa_kernel(backend):
                k, v = pools[i]
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return Calls(call, copies, lambda y: relative(*_attended(shape, y, q, *pools[0])))

    return build


def _attended(
    shape: Attention, y: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The last queries of the last sequence: as found and in fp64 [H, few, D]."""
    few, each = min(shape.new, CHECKED // 8), shape.heads // shape.kv_heads
    wide = [t[-1].double().repeat_interleave(each, dim=0) for t in (k, v)]
    scores = q[-1, :, -few:].double() @ wide[0].mT * shape.dim**-0.5
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril(shape.context - few)
    scores = scores.masked_fill(~seen, float("-inf"))
    return y[-1, :, -few:], scores.softmax(-1) @ wide[1]


def copy(shape: Shape, device: torch.device) -> Calls:
    """As many bytes, half of them read and half written."""
    assert isinstance(shape, Traffic)
    copies, half = copies_of(shape.nbytes), shape.nbytes // 2
    sources = torch.randint(0, 256, (copies, half), device=device, dtype=torch.uint8)
    targets = torch.zeros_like(sources)
    return Calls(
        lambda i: targets[i].copy_(sources[i]),
        copies,
        lambda y: float((y != sources[0]).any()),
    )


LINEAR, INT_MM = Peer("F.linear", bf16_linear), Peer("_int_mm", int_mm)
TINYGEMM = Peer("tinygemm", tinygemm, by_group=True)
OF_GEMMS = {
    "w4a16": (TINYGEMM, LINEAR),
    "w4a8": (INT_MM, LINEAR),
    "w8a8": (INT_MM, LINEAR),
    "fp8": (Peer("_scaled_mm", scaled_mm), LINEAR),
    "fp8_block": (Peer("scaled_mm 128", scaled_mm_blocks), LINEAR),
}
OF_ATTENTION = (
    Peer("flash sdpa", sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("cudnn sdpa", sdpa(SDPBackend.CUDNN_ATTENTION)),
)


def peers_for(shape: Shape | None) -> tuple[Peer, ...]:
    """What may compute a shape, the closest relative first."""
    if isinstance(shape, Gemm):
        base = max(
            (name for name in OF_GEMMS if shape.family.startswith(name)), key=len, default=""
        )
        return OF_GEMMS.get(base, (LINEAR,))
    if isinstance(shape, Attention):
        return OF_ATTENTION
    return () if shape is None else (Peer("copy", copy),)
