"""Linear layers of a loaded model: quantized or not, read and merged from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import ActivationSpec, LayerScheme
from formats.weights import StoredWeight
from kernels.numerics import TYPES
from kernels.ops import fake_quantize_fp8, linear, quantize_per_token, quantize_static
from kernels.weights import Weight, pack_float_weight, pack_quantized_weight

if TYPE_CHECKING:
    from inference.gpu.layers import GpuLinear

log = logging.getLogger("ptq.inference")


@dataclass(frozen=True)
class Placement:
    """Where a model runs, and in which type.

    Attributes:
        device: Where its tensors are.
        dtype: Of activations and of float weights.
        triton: Whether the kernels of `kernels.triton` run: on any GPU, and on a CPU where Triton
            interprets.
    """

    device: torch.device
    dtype: torch.dtype
    triton: bool = False


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
    checkpoint: Checkpoint, modules: Sequence[str], place: Placement
) -> Linear | GpuLinear:
    """Read linear layers that see the same input as one layer, their outputs side by side.

    Args:
        checkpoint: Where from.
        modules: Full names, such as the q, k and v projections of a block.
        place: Where to.

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
        bias = torch.cat(parts).to(place.device)
    if not quantized[0]:
        names = [f"{module}.weight" for module in modules]
        weight = torch.cat([checkpoint.tensor(name).to(place.device) for name in names])
        return _float_linear(weight, bias, place)
    return _quantized_linear(checkpoint, modules, bias, place)


def _float_linear(weight: Tensor, bias: Tensor | None, place: Placement) -> Linear | GpuLinear:
    if not place.triton:
        return Linear(pack_float_weight(weight, bias, place.dtype))
    from inference.gpu.layers import GpuLinear
    from kernels.triton.linear import DenseWeight, Rows

    held = DenseWeight(weight.to(place.dtype), None if bias is None else bias.to(place.dtype))
    return GpuLinear(held, Rows(place.dtype))


def _quantized_linear(
    checkpoint: Checkpoint, modules: Sequence[str], bias: Tensor | None, place: Placement
) -> Linear | GpuLinear:
    scheme = _one_scheme(checkpoint, modules)
    spec, activations = scheme.weights, scheme.activations
    assert spec is not None
    input_scale = _input_scale(checkpoint, modules, place.device)
    q, parts = _read_together(checkpoint, modules, TYPES[spec.dtype].storage, place.device)
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    scale = torch.cat([_scale_by_row(part, spec.block[0]) for part in parts])
    zero_point = torch.cat(zeros) if zeros else None
    group = None if spec.block[1] == -1 else spec.block[1]
    if not place.triton:
        integers = activations is not None and activations.dtype == "int8"
        packed = pack_quantized_weight(
            q, scale, spec.dtype, zero_point, group, bias, integer_inputs=integers
        )
        return Linear(packed, activations, input_scale)
    from inference.gpu.layers import GpuLinear, rows_of
    from kernels.triton.linear import DenseWeight, pack

    rows = rows_of(activations, input_scale, place.dtype)
    own = pack(q, scale, zero_point, bias, rows, place.dtype, bits=spec.bits, group=group)
    if isinstance(own, DenseWeight):
        log.warning(
            "%s: no GPU kernel takes %s of %s; it runs dequantized, with the same numbers",
            " + ".join(modules), scheme.text, tuple(q.shape),
        )  # fmt: skip
    return GpuLinear(own, rows)


def _read_together(
    checkpoint: Checkpoint, modules: Sequence[str], storage: torch.dtype, device: torch.device
) -> tuple[Tensor, list[StoredWeight]]:
    """Integers [N of all, K] of layers, and each weight with its rows of them.

    Each is read to its place, so that nothing as large is held beside them.
    """
    shapes = [checkpoint.weight_shape(module) for module in modules]
    rows = [shape[0] for shape in shapes]
    q = torch.empty(sum(rows), shapes[0][1], dtype=storage, device=device)
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
