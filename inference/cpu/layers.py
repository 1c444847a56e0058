"""Linear layers on a CPU, run by the ops of `kernels.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.scheme import ActivationSpec
from inference.models.read import StoredLinear
from kernels.cpu.weights import FloatWeight, Weight, pack_float_weight, pack_quantized_weight
from kernels.ops import (
    fake_quantize_fp8,
    linear,
    quantize_per_token,
    quantize_static,
    weight_rows,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, quantized or not.

    Attributes:
        weight: Packed for the ops.
        activations: How the input is quantized, or None.
        input_scale: fp32, one element, or None where each token is scaled when it arrives.
        sink_scale: The same of sink tokens; None where they have no scale of their own.
        order: int64 [K], the input that each column of the weight multiplies; None where column k
            multiplies input k.
    """

    weight: Weight
    activations: ActivationSpec | None = None
    input_scale: Tensor | None = None
    order: Tensor | None = None
    sink_scale: Tensor | None = None

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`; `sinks` as of `LinearLayer`."""
        spec = self.activations
        if self.order is not None:
            x = x[:, self.order]
        if spec is None:
            return linear(x, self.weight, None, x.dtype)
        if spec.dtype == "fp8_e4m3":
            seen = fake_quantize_fp8(x, self.input_scale, spec.group)
            if sinks is not None and self.sink_scale is not None:
                seen[sinks] = fake_quantize_fp8(x[sinks], self.sink_scale)
            return linear(seen, self.weight, None, x.dtype)
        if self.input_scale is None:
            xq, scale = quantize_per_token(x)
        else:
            xq, scale = static_integers(x, self.input_scale, self.sink_scale, sinks)
        return linear(xq, self.weight, scale, x.dtype)

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it lies in memory."""
        return self.order is None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T]."""
        return weight_rows(self.weight, ids).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor | None:
        """The weight [N, K], where there are no compiled kernels and it lies as that."""
        return self.weight.packed if isinstance(self.weight, FloatWeight) else None


@dataclass(frozen=True)
class CpuExperts:
    """The same linear layer of each expert of a mixture, in the router's order."""

    each: Sequence[Linear]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(layer.nbytes for layer in self.each)


def static_integers(
    x: Tensor, scale: Tensor, sink_scale: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows quantized with static scales.

    Args:
        x: Float [T, K].
        scale: fp32, one element.
        sink_scale: That of rows of sink tokens, or None.
        sinks: bool [T], which rows these are, or None.

    Returns:
        (int8 [T, K], scales fp32: one element, or [T, 1]).
    """
    xq = quantize_static(x, scale)
    if sinks is None or sink_scale is None:
        return xq, scale
    xq[sinks] = quantize_static(x[sinks], sink_scale)
    return xq, torch.where(sinks[:, None], sink_scale.reshape(()), scale.reshape(()))


def pack_linear(stored: StoredLinear, dtype: torch.dtype) -> Linear:
    """Lay a layer out for the ops; `dtype` is that of float weights."""
    weights, activations = stored.scheme.weights, stored.scheme.activations
    if weights is None or stored.scale is None:
        return Linear(pack_float_weight(stored.weight, stored.bias, dtype))
    weight, scale, kind = stored.weight, stored.scale, weights.dtype
    if kind == "fp4_e2m1":  # twice its values are integers, up to 12
        weight, scale, kind = (weight.float() * 2).to(torch.int8), scale / 2, "int8"
    packed = pack_quantized_weight(
        weight,
        scale,
        kind,
        stored.zero_point,
        stored.group,
        stored.bias,
        integer_inputs=activations is not None and activations.dtype == "int8",
    )
    return Linear(packed, activations, stored.input_scale, stored.order, stored.sink_scale)
