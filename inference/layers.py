"""Linear layers of a loaded model: quantized or not, read and merged from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import ActivationSpec, LayerScheme
from kernels.numerics import TYPES, dequantize, fake_quantize_activations
from kernels.ops import (
    FloatWeight,
    Int8Weight,
    float_linear,
    int8_linear,
    pack_float_weight,
    pack_int8_weight,
    quantize_per_token,
    quantize_static,
)


@dataclass(frozen=True)
class FloatLinear:
    """x W^T + b without quantization."""

    weight: FloatWeight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return float_linear(x, self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes


@dataclass(frozen=True)
class Int8Linear:
    """W8A8: int8 weights and activations, int32 sums.

    Attributes:
        weight: Packed weight.
        input_scale: fp32, one element, or None where each token is scaled when it arrives.
    """

    weight: Int8Weight
    input_scale: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`."""
        if self.input_scale is None:
            xq, scale = quantize_per_token(x)
        else:
            xq, scale = quantize_static(x, self.input_scale), self.input_scale
        return int8_linear(xq, scale, self.weight, x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes


@dataclass(frozen=True)
class DequantizedLinear:
    """Any other scheme: the numbers that the stored weight stands for, held in floating point.

    The input goes through the same quantization as in a kernel of integers or fp8, so that the
    result is that of one up to the rounding of sums; memory and speed are those of a float layer.

    Attributes:
        weight: The dequantized weight, in fp32.
        activations: How the input is quantized, or None.
        input_scale: fp32, one element, where that is static.
    """

    weight: FloatWeight
    activations: ActivationSpec | None
    input_scale: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`."""
        seen, spec = x, self.activations
        if spec is not None:
            kind = TYPES[spec.dtype]
            seen = fake_quantize_activations(x, self.input_scale, kind, spec.group)
        return float_linear(seen, self.weight).to(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes


Linear = FloatLinear | Int8Linear | DequantizedLinear


def load_linear(
    checkpoint: Checkpoint, modules: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Linear:
    """Read linear layers that see the same input as one layer, their outputs side by side.

    Args:
        checkpoint: Where from.
        modules: Full names, such as the q, k and v projections of a block.
        device: Where to.
        dtype: Type of float weights.

    Raises:
        CheckpointError: some are quantized and some are not, their schemes, input scales or widths
            differ, or a tensor is missing.
    """
    quantized = [module in checkpoint.quantized_modules for module in modules]
    if any(quantized) != all(quantized):
        raise CheckpointError(
            f"{', '.join(modules)} share one input, but only some are quantized; quantize all of "
            "them or ignore all of them"
        )
    shapes = [checkpoint.weight_shape(module) for module in modules]
    if len({columns for _, columns in shapes}) > 1:
        raise CheckpointError(f"{', '.join(modules)} share one input, but differ in its width")
    biases = [f"{module}.bias" in checkpoint for module in modules]
    bias = None
    if any(biases):
        parts = [
            checkpoint.tensor(f"{module}.bias").float() if has else torch.zeros(shape[0])
            for module, shape, has in zip(modules, shapes, biases, strict=True)
        ]
        bias = torch.cat(parts)
    if not quantized[0]:
        weight = torch.cat([checkpoint.tensor(f"{module}.weight") for module in modules])
        return FloatLinear(pack_float_weight(weight, bias, dtype, device))
    return _quantized_linear(checkpoint, modules, bias, device)


def _quantized_linear(
    checkpoint: Checkpoint, modules: Sequence[str], bias: Tensor | None, device: torch.device
) -> Linear:
    scheme = _one_scheme(checkpoint, modules)
    spec, activations = scheme.weights, scheme.activations
    assert spec is not None
    input_scale = _input_scale(checkpoint, modules, device)
    weights = [checkpoint.weight(module) for module in modules]
    if spec.dtype == "int8" and activations is not None:
        q, scale = torch.cat([w.q for w in weights]), torch.cat([w.scale for w in weights])
        return Int8Linear(pack_int8_weight(q, scale, bias, device), input_scale)
    values = [dequantize(w.q, w.scale, w.zero_point, spec.block) for w in weights]
    packed = pack_float_weight(torch.cat(values), bias, torch.float32, device)
    return DequantizedLinear(packed, activations, input_scale)


def _one_scheme(checkpoint: Checkpoint, modules: Sequence[str]) -> LayerScheme:
    schemes = {module: checkpoint.scheme_of(module) for module in modules}
    if len(set(schemes.values())) > 1:
        found = "; ".join(f"{module}: {scheme.text}" for module, scheme in schemes.items())
        raise CheckpointError(
            f"layers that run as one differ in their scheme: {found}. Write the checkpoint with "
            "one scheme for them"
        )
    return schemes[modules[0]]


def _input_scale(
    checkpoint: Checkpoint, modules: Sequence[str], device: torch.device
) -> Tensor | None:
    names = [f"{module}.input_scale" for module in modules]
    if names[0] not in checkpoint:
        return None
    scales = {name: checkpoint.scale(name).item() for name in names}
    if len(set(scales.values())) > 1:
        raise CheckpointError(
            f"input scales of layers that share one input differ: {scales}. Runtimes that merge "
            "them would use one for all; write the checkpoint with one scale"
        )
    return torch.tensor(scales[names[0]], device=device)
