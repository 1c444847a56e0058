"""Linear layers of a loaded model: quantized or not, read and merged from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import ActivationSpec, LayerScheme
from formats.weights import StoredWeight
from kernels.numerics import TYPES
from kernels.ops import (
    Weight,
    fake_quantize_fp8,
    linear,
    pack_float_weight,
    pack_quantized_weight,
    quantize_per_token,
    quantize_static,
)


@dataclass(frozen=True)
class Linear:
    """A linear layer, quantized or not.

    Attributes:
        weight: Packed for the device it runs on.
        activations: How the input is quantized, or None.
        input_scale: fp32, one element, or None where each token is scaled when it arrives.
    """

    weight: Weight
    activations: ActivationSpec | None = None
    input_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float -> [T, N] in the type of `x`."""
        spec = self.activations
        if spec is None:
            return linear(x, self.weight, None, x.dtype)
        if spec.dtype == "fp8_e4m3":
            seen = fake_quantize_fp8(x, self.input_scale, spec.group)
            return linear(seen, self.weight, None, x.dtype)
        if self.input_scale is None:
            xq, scale = quantize_per_token(x)
        else:
            xq, scale = quantize_static(x, self.input_scale), self.input_scale
        return linear(xq, self.weight, scale, x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes


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
        return Linear(pack_float_weight(weight, bias, dtype, device))
    return _quantized_linear(checkpoint, modules, bias, device)


def _quantized_linear(
    checkpoint: Checkpoint, modules: Sequence[str], bias: Tensor | None, device: torch.device
) -> Linear:
    scheme = _one_scheme(checkpoint, modules)
    spec, activations = scheme.weights, scheme.activations
    assert spec is not None
    input_scale = _input_scale(checkpoint, modules, device)
    q, parts = _read_together(checkpoint, modules, TYPES[spec.dtype].storage)
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    packed = pack_quantized_weight(
        q,
        torch.cat([_scale_by_row(part, spec.block[0]) for part in parts]),
        spec.dtype,
        torch.cat(zeros) if zeros else None,
        None if spec.block[1] == -1 else spec.block[1],
        bias,
        integer_inputs=activations is not None and activations.dtype == "int8",
        device=device,
    )
    return Linear(packed, activations, input_scale)


def _read_together(
    checkpoint: Checkpoint, modules: Sequence[str], storage: torch.dtype
) -> tuple[Tensor, list[StoredWeight]]:
    """Integers [N of all, K] of layers, and each weight with its rows of them.

    Each is read to its place, so that nothing as large is held beside them.
    """
    shapes = [checkpoint.weight_shape(module) for module in modules]
    rows = [shape[0] for shape in shapes]
    q = torch.empty(sum(rows), shapes[0][1], dtype=storage)
    places = zip(modules, q.split(rows), strict=True)
    return q, [checkpoint.weight(module, place) for module, place in places]


def _scale_by_row(weight: StoredWeight, length: int) -> Tensor:
    """Scales [N, groups] of a weight [N, K] whose blocks have `length` rows, -1 for all."""
    rows = weight.q.shape[0]
    if length == 1:
        return weight.scale
    return weight.scale.repeat_interleave(rows if length == -1 else length, dim=0)[:rows]


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
