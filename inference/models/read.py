"""Linear layers as a checkpoint stores them: read, checked, and merged where they run as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from formats.checkpoint.kv_scales import LEAF
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.scheme import LayerScheme
from kernels.numerics import dequantize

TOGETHER = 1 << 25  # weights of experts that are read and packed at once


@dataclass(frozen=True)
class StoredLinear:
    """A linear layer, or a stack of E alike: then every tensor has E before its own dimensions.

    Attributes:
        names: Full names of the modules that it was merged from, of each of the stack.
        scheme: How it is quantized.
        weight: [N, K]: floats, integers (int4 too, one a byte) or e4m3.
        scale: fp32 [N, groups] where the weight is quantized, else None.
        zero_point: int8 or fp32 [N, groups], or None.
        bias: fp32 [N], or None.
        input_scale: fp32, one element, or None where each token is scaled when it arrives.
        order: int64 [K], the input that each column of the weight multiplies; None where column k
            multiplies input k.
        unit: fp32 [N, 1], what the scales of NVFP4 are e4m3 multiples of; None for others.
        sink_scale: As `input_scale`, of the rows of sink tokens; None where they have the same.
    """

    names: Sequence[Sequence[str]]
    scheme: LayerScheme
    weight: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    order: Tensor | None = None
    unit: Tensor | None = None
    sink_scale: Tensor | None = None

    @property
    def group(self) -> int | None:
        """Inputs that share a scale; None for all of an output's."""
        spec = self.scheme.weights
        return None if spec is None or spec.block[1] == -1 else spec.block[1]

    def unstacked(self) -> Iterator[StoredLinear]:
        """The layers of a stack."""
        tensors = {name: own for name, own in vars(self).items() if isinstance(own, Tensor)}
        for i, names in enumerate(self.names):
            yield replace(self, names=[names], **{name: own[i] for name, own in tensors.items()})


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
        """Outputs of all of them, which lie side by side."""
        return sum(rows for rows, _ in self.shapes)

    @property
    def inputs(self) -> int:
        """Inputs of each of them: they see the same."""
        return self.shapes[0][1]


def read_linear(
    checkpoint: Checkpoint, modules: Sequence[str], device: torch.device
) -> StoredLinear:
    """Read linear layers that see the same input as one layer, their outputs side by side.

    Args:
        modules: Full names, such as the q, k and v projections of a block.

    Raises:
        CheckpointError: some are quantized and some are not, their schemes, input scales or widths
            differ, or a tensor is missing.
    """
    return _read(checkpoint, [modules], _form(checkpoint, modules), device)


def read_stacks(
    checkpoint: Checkpoint, layers: Iterable[Sequence[str]], device: torch.device
) -> Iterator[StoredLinear]:
    """Read layers many at a time, by the calls of one, which is what takes the time.

    Args:
        layers: As many times the modules of `read_linear`, such as an expert's gate and up.

    Yields:
        Some of the layers, in order, stacked: `TOGETHER` weights, or one layer if it has more.

    Raises:
        CheckpointError: as `read_linear`.
    """
    for form, run in groupby(layers, partial(_form, checkpoint)):
        alike, count = list(run), max(1, TOGETHER // (form.outputs * form.inputs))
        for i in range(0, len(alike), count):
            part = alike[i : i + count]
            yield _read(checkpoint, part, form, device, (len(part),))


def finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor whose NaN would be every token's.

    Raises:
        CheckpointError: it is missing, or holds NaN or infinity.
    """
    tensor = checkpoint.tensor(name)
    if tensor.numel() and not all(bool(torch.isfinite(end)) for end in tensor.aminmax()):
        raise CheckpointError(
            f"{name} holds NaN or infinity. The checkpoint is damaged; copy or write it again"
        )
    return tensor


def dequantized(stored: StoredLinear) -> Tensor:
    """The floats that a layer multiplies: [N, K], its inputs in their own order."""
    weight = stored.weight
    if stored.scale is not None:
        block = (1, stored.group or -1)
        weight = dequantize(weight, stored.scale, stored.zero_point, block)
    if stored.order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, stored.order, weight)


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
            "one scheme for them, or make a float model of it with `ptq convert CHECKPOINT FLOAT "
            "--to float`"
        )
    biases = tuple(f"{module}.bias" in checkpoint for module in modules)
    static = quantized[0] and f"{modules[0]}.input_scale" in checkpoint
    return Form(schemes[modules[0]], shapes, biases, static)


def _read(
    checkpoint: Checkpoint,
    layers: Sequence[Sequence[str]],
    form: Form,
    device: torch.device,
    many: tuple[int, ...] = (),
) -> StoredLinear:
    """Read layers of a form: one, or `many`, of which every tensor then has that dimension."""
    bias = _bias(checkpoint, layers, form, device, many) if any(form.biases) else None
    modules, spec = [module for layer in layers for module in layer], form.scheme.weights
    if spec is None:
        weight = checkpoint.tensors([f"{module}.weight" for module in modules]).to(device)
        return StoredLinear(layers, form.scheme, weight.view(*many, -1, form.inputs), bias=bias)
    stored = checkpoint.weights(modules, device)
    rows = [shape[0] for _ in layers for shape in form.shapes]
    known = checkpoint.sinks.scales if form.static else {}
    sinks = torch.cat([known[module] for module in modules]) if known else None
    if sinks is not None:
        sinks = _one_for_each(layers, sinks, LEAF).reshape(many).to(device)
    shape, zero = (*many, form.outputs, -1), stored.zero_point
    return StoredLinear(
        layers,
        form.scheme,
        weight=stored.q.view(shape),
        scale=_scale_by_row(stored.scale, rows, spec.block[0]).view(shape),
        zero_point=None if zero is None else zero.view(shape),
        bias=bias,
        input_scale=_input_scale(checkpoint, layers, device, many) if form.static else None,
        sink_scale=sinks,
        order=None if stored.order is None else _order(checkpoint, layers, stored.order, many),
        unit=None if stored.unit is None else stored.unit.view(shape),
    )


def _bias(
    checkpoint: Checkpoint,
    layers: Sequence[Sequence[str]],
    form: Form,
    device: torch.device,
    many: tuple[int, ...],
) -> Tensor:
    """The biases of each layer side by side, zeros where a module has none: fp32 [many, N]."""
    parts = [
        checkpoint.tensor(f"{module}.bias").float() if has else torch.zeros(shape[0])
        for layer in layers
        for module, shape, has in zip(layer, form.shapes, form.biases, strict=True)
    ]
    return torch.cat(parts).to(device).view(*many, -1)


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
    scales = checkpoint.tensors(names).float()
    return _one_for_each(layers, scales, "input_scale").reshape(many).to(device)


def _one_for_each(layers: Sequence[Sequence[str]], scales: Tensor, leaf: str) -> Tensor:
    """The scale of each layer, of those of its modules, which must be one: fp32 [layers]."""
    scales = scales.view(len(layers), -1)
    for layer, own in zip(layers, scales.tolist(), strict=True):
        if len(set(own)) > 1:
            found = dict(zip((f"{module}.{leaf}" for module in layer), own, strict=True))
            raise CheckpointError(
                f"input scales of layers that share one input differ: {found}. Runtimes that merge "
                "them would use one for all; write the checkpoint with one scale"
            )
    return scales[:, 0]


def _order(
    checkpoint: Checkpoint, layers: Sequence[Sequence[str]], orders: Tensor, many: tuple[int, ...]
) -> Tensor:
    """The order of each layer's inputs, int64 [many, K], of those of its modules."""
    own = orders.view(len(layers), -1, orders.shape[-1])
    for layer, same in zip(layers, (own == own[:, :1]).flatten(1).all(1).tolist(), strict=True):
        if not same:
            raise CheckpointError(
                f"{', '.join(layer)} share one input, but group it in different orders (g_idx, "
                "act-order), and cannot run as one. Make a float model of it with `ptq convert "
                f"{checkpoint.path} FLOAT --to float`, then `ptq quantize FLOAT --scheme w4`"
            )
    return own[:, 0].reshape(*many, -1)
