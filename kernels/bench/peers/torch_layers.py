"""Linear layers of stock torch; see `kernels.bench.peers.torch_peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.ops as ops
from kernels.bench.draw import FP8, draw_rows, integers, relative
from kernels.bench.shapes import Gemm, Shape
from kernels.bench.timing import rotated

BF16 = torch.bfloat16
FEW = 256  # rows that tinygemm is for on a GPU
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


def _calls(
    call: Callable[[int], Tensor], weights: list[Tensor], x: Tensor, weight: Tensor
) -> Calls:
    """Of a layer whose result is x @ weight.T; x [M, K], weight fp64 [some of N, K]."""
    few = weight.shape[0]
    return Calls(call, len(weights), lambda y: relative(y[:, :few], x.double() @ weight.T))


def linear(shape: Shape, device: torch.device) -> Calls:
    """The float layer in 16 bits, bf16 unless results are fp16: cuBLAS on a GPU."""
    assert isinstance(shape, Gemm)
    return _float_linear(shape, device, BF16 if shape.dtype == "float32" else _type(shape))


def fp32_linear(shape: Shape, device: torch.device) -> Calls:
    """The float layer in fp32."""
    assert isinstance(shape, Gemm)
    return _float_linear(shape, device, torch.float32)


def _float_linear(shape: Gemm, device: torch.device, dtype: torch.dtype) -> Calls:
    size = (shape.outputs, shape.inputs)
    weights = rotated(torch.randn(size, device=device, dtype=dtype))
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=_type(shape))
    few = weights[0][:CHECKED].double()
    return _calls(lambda i: F.linear(x.to(dtype), weights[i]), weights, x, few)


def _type(shape: Gemm) -> torch.dtype:
    return getattr(torch, shape.dtype)


def tinygemm(shape: Shape, device: torch.device) -> Calls:
    """4-bit weights in groups, bf16 scales and zeros: w = (q - 8) scale + zero."""
    assert isinstance(shape, Gemm)
    if shape.dtype == "float16" or shape.group not in (32, 64, 128, 256):
        raise UnavailableError("it takes bf16 and groups of 32, 64, 128 or 256")
    if shape.rows > FEW and device.type == "cuda":
        raise UnavailableError(f"it is made for few rows; not measured above {FEW}")
    q = torch.randint(0, 16, (shape.outputs, shape.inputs), device=device)
    weights = rotated(_pack_int4(q))
    pairs = torch.rand(shape.inputs // shape.group, shape.outputs, 2, device=device) * 0.01
    pairs = pairs.to(BF16)
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=_type(shape))
    own = f"_weight_int4pack_mm{'_for_cpu' if device.type == 'cpu' else ''}"
    op = getattr(torch.ops.aten, own)
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


def int8_pack_mm(shape: Shape, device: torch.device) -> Calls:
    """8-bit weights with a scale an output, and bf16 inputs."""
    assert isinstance(shape, Gemm)
    q = integers((shape.outputs, shape.inputs), 8, device)
    weights = rotated(q)
    scale = (torch.rand(shape.outputs, device=device) * 0.01).to(BF16)
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=_type(shape))

    def call(i: int) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.to(BF16), weights[i], scale)

    few = q[:CHECKED].double() * scale[:CHECKED, None].double()
    return _calls(call, weights, x, few)


def int_mm(shape: Shape, device: torch.device) -> Calls:
    """int8 by int8 to int32, then the scales of rows and columns in two ops."""
    assert isinstance(shape, Gemm)
    if shape.rows <= 16 and device.type == "cuda":
        raise UnavailableError("it takes more than 16 rows")
    scale = torch.rand(shape.outputs, device=device) * 0.01
    out = torch.empty(shape.rows, shape.outputs, device=device, dtype=_type(shape))
    weights, rows = _eight_bits(shape, device)
    if shape.dtype == "float32":  # on a CPU, where they are quantized by whoever needs that
        wide = torch.randn(shape.rows, shape.inputs)
        quantized = partial(ops.quantize_per_token, wide)
    else:
        quantized = partial(tuple, rows)

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


def scaled_mm(shape: Shape, device: torch.device) -> Calls:
    """e4m3 by e4m3 with scales of rows and columns."""
    assert isinstance(shape, Gemm)
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
