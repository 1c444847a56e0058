"""Linear layers of a loaded model: quantized or not, read and merged from a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import ActivationSpec, LayerScheme
from kernels.ops import fake_quantize_fp8, linear, quantize_per_token, quantize_static
from kernels.weights import Weight, pack_float_weight, pack_quantized_weight

if TYPE_CHECKING:
    from inference.gpu.layers import GpuLinear

log = logging.getLogger("ptq.inference")

TOGETHER = 1 << 25  # weights of experts that are read and packed at once


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


@dataclass(frozen=True)
class Form:
    """What is known of layers that run as one before they are read; equal ones are read together.

    Attributes:
        scheme: How they are quantized.
        shapes: Of each weight: outputs, inputs.
        biases: Which have one.
        static: Whether their input has a scale of its own.
    """

    scheme: LayerScheme
    shapes: tuple[tuple[int, ...], ...]
    biases: tuple[bool, ...]
    static: bool

    @property
    def outputs(self) -> int:
        """Of all."""
        return sum(rows for rows, _ in self.shapes)

    @property
    def inputs(self) -> int:
        """Of each."""
        return self.shapes[0][1]


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
    return _load(checkpoint, [modules], _form(checkpoint, modules), place)


def load_stacks(
    checkpoint: Checkpoint, layers: Iterable[Sequence[str]], place: Placement
) -> Iterator[GpuLinear]:
    """Read layers for a GPU's kernels, many by the calls of one, which is what takes the time.

    Args:
        checkpoint: Where from.
        layers: As many times the modules of `load_linear`, such as an expert's gate and up.
        place: Where to.

    Yields:
        Some of the layers, in order: each tensor has a dimension for them before its own. What is
        held beside them is that of `TOGETHER` weights, or of one layer.

    Raises:
        CheckpointError: as `load_linear`.
    """
    for form, run in groupby(layers, partial(_form, checkpoint)):
        alike, count = list(run), max(1, TOGETHER // (form.outputs * form.inputs))
        for i in range(0, len(alike), count):
            part = alike[i : i + count]
            yield cast("GpuLinear", _load(checkpoint, part, form, place, (len(part),)))


def _form(checkpoint: Checkpoint, modules: Sequence[str]) -> Form:
    schemes = {module: checkpoint.scheme_of(module) for module in modules}
    quantized = [scheme.weights is not None for scheme in schemes.values()]
    if any(quantized) != all(quantized):
        raise CheckpointError(
            f"{', '.join(modules)} share one input, but only some are quantized; quantize all of "
            "them or ignore all of them"
        )
    shapes = tuple(checkpoint.weight_shape(module) for module in modules)
    if len({columns for _, columns in shapes}) > 1:
        raise CheckpointError(f"{', '.join(modules)} share one input, but differ in its width")
    if len(set(schemes.values())) > 1:
        found = "; ".join(f"{module}: {scheme.text}" for module, scheme in schemes.items())
        raise CheckpointError(
            f"layers that run as one differ in their scheme: {found}. Write the checkpoint with "
            "one scheme for them"
        )
    biases = tuple(f"{module}.bias" in checkpoint for module in modules)
    static = quantized[0] and f"{modules[0]}.input_scale" in checkpoint
    return Form(schemes[modules[0]], shapes, biases, static)


def _load(
    checkpoint: Checkpoint,
    layers: Sequence[Sequence[str]],
    form: Form,
    place: Placement,
    many: tuple[int, ...] = (),
) -> Linear | GpuLinear:
    """Read layers of a form: one, or `many`, of which every tensor then has that dimension."""
    modules = [module for layer in layers for module in layer]
    bias = None
    if any(form.biases):
        parts = [
            checkpoint.tensor(f"{module}.bias").float() if has else torch.zeros(shape[0])
            for layer in layers
            for module, shape, has in zip(layer, form.shapes, form.biases, strict=True)
        ]
        bias = torch.cat(parts).to(place.device).view(*many, -1)
    if form.scheme.weights is None:
        weight = checkpoint.tensors([f"{module}.weight" for module in modules]).to(place.device)
        return _float_linear(weight.view(*many, -1, form.inputs), bias, place)
    input_scale = _input_scale(checkpoint, layers, place.device, many) if form.static else None
    return _quantized_linear(checkpoint, modules, form, bias, input_scale, place, many)


def _float_linear(weight: Tensor, bias: Tensor | None, place: Placement) -> Linear | GpuLinear:
    if not place.triton:
        return Linear(pack_float_weight(weight, bias, place.dtype))
    from inference.gpu.layers import GpuLinear
    from kernels.triton.linear.dispatch import DenseWeight, InputFormat

    held = DenseWeight(weight.to(place.dtype), None if bias is None else bias.to(place.dtype))
    return GpuLinear(held, InputFormat(place.dtype))


def _quantized_linear(
    checkpoint: Checkpoint,
    modules: Sequence[str],
    form: Form,
    bias: Tensor | None,
    input_scale: Tensor | None,
    place: Placement,
    many: tuple[int, ...],
) -> Linear | GpuLinear:
    spec, activations = form.scheme.weights, form.scheme.activations
    assert spec is not None
    stored = checkpoint.weights(modules, place.device)
    rows = [shape[0] for shape in form.shapes] * (len(modules) // len(form.shapes))
    q, scale, zero_point = (
        None if part is None else part.view(*many, form.outputs, -1)
        for part in (stored.q, _scale_by_row(stored.scale, rows, spec.block[0]), stored.zero_point)
    )
    assert q is not None
    assert scale is not None
    group = None if spec.block[1] == -1 else spec.block[1]
    if not place.triton:
        integers = activations is not None and activations.dtype == "int8"
        packed = pack_quantized_weight(
            q, scale, spec.dtype, zero_point, group, bias, integer_inputs=integers
        )
        return Linear(packed, activations, input_scale)
    from inference.gpu.layers import GpuLinear, rows_of
    from kernels.triton.linear.dispatch import DenseWeight, pack

    inputs = rows_of(activations, input_scale, place.dtype)
    own = pack(q, scale, zero_point, bias, inputs, place.dtype, bits=spec.bits, group=group)
    if isinstance(own, DenseWeight):
        first, others = modules[: len(form.shapes)], math.prod(many) - 1
        log.warning(
            "%s%s: no GPU kernel takes %s of %s; it runs dequantized, with the same numbers",
            " + ".join(first), f" and {others} more" if others else "", form.scheme.text,
            (form.outputs, form.inputs),
        )  # fmt: skip
    return GpuLinear(own, inputs)


def _scale_by_row(scale: Tensor, rows: Sequence[int], length: int) -> Tensor:
    """Scales [N, groups] of weights of some rows each, whose blocks have `length`, -1 for all."""
    if length == 1:
        return scale
    steps = [n if length == -1 else length for n in rows]
    sizes = [
        min(step, n - first)
        for n, step in zip(rows, steps, strict=True)
        for first in range(0, n, step)
    ]
    repeats = torch.tensor(sizes, device=scale.device)
    return scale.repeat_interleave(repeats, dim=0, output_size=sum(rows))


def _input_scale(
    checkpoint: Checkpoint,
    layers: Sequence[Sequence[str]],
    device: torch.device,
    many: tuple[int, ...],
) -> Tensor:
    """The scale of each layer's input, fp32 of the shape `many`."""
    names = [f"{module}.input_scale" for layer in layers for module in layer]
    scales = checkpoint.tensors(names).float().view(len(layers), -1)
    for layer, own in zip(layers, scales.tolist(), strict=True):
        if len(set(own)) > 1:
            found = dict(zip((f"{module}.input_scale" for module in layer), own, strict=True))
            raise CheckpointError(
                f"input scales of layers that share one input differ: {found}. Runtimes that merge "
                "them would use one for all; write the checkpoint with one scale"
            )
    return scales[:, 0].reshape(many).to(device)
