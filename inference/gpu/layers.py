"""Linear layers on a GPU: packed for their kernels, and run by them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from formats.scheme import ActivationSpec
from inference.models.read import StoredLinear
from kernels.triton.common import Workspace
from kernels.triton.fused import quantize_rows
from kernels.triton.linear.dispatch import FP8, pack
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import GpuWeight, InputFormat

log = logging.getLogger("ptq.inference")

_workspaces: WeakValueDictionary[tuple[torch.device, int], Workspace] = WeakValueDictionary()


def workspace_on(device: torch.device) -> Workspace:
    """The workspace of split sums of the current stream of a device.

    It lives as long as somebody holds it: who runs many layers does, so that they share it.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _workspaces.get((device, stream))
    if found is None:
        found = _workspaces[device, stream] = Workspace.on(device)
    return found


def rows_of(
    activations: ActivationSpec | None, input_scale: Tensor | None, dtype: torch.dtype
) -> InputFormat:
    """How a layer of a scheme wants its input; `dtype` is the model's float type."""
    if activations is None:
        return InputFormat(dtype)
    kind = torch.int8 if activations.dtype == "int8" else FP8
    return InputFormat(kind, input_scale, None if activations.group == -1 else activations.group)


def as_wanted(
    x: Tensor, own: InputFormat, by: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Float rows [T, K] as a layer wants them, and their scales.

    Args:
        x: In the model's float type.
        own: How the layer wants them.
        by: As in `quantize_rows`, the experts that scale them.
    """
    if own.dtype == x.dtype:
        return x.contiguous(), None
    return quantize_rows(x.contiguous(), own.scale, own.dtype, own.group, by)


@dataclass(frozen=True)
class GpuLinear:
    """A linear layer on a GPU, quantized or not.

    Attributes:
        weight: Packed for its kernel.
        rows: How its input is given to `run`.
        order: int64 [K], the input that each column of the weight multiplies, of a stack [E, K];
            None where column k multiplies input k.
    """

    weight: GpuWeight
    rows: InputFormat
    order: Tensor | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[T, K] float -> [T, N] in `dtype`, by default the type of `x`."""
        return self.run(*as_wanted(x, self.rows), dtype or x.dtype)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The layer on rows that are as it wants them: [T, N] in `dtype`."""
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        return self.weight.run(rows, scales, workspace_on(rows.device), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor | None:
        """The weight [N, K], where it is not quantized."""
        return self.weight.weight if isinstance(self.weight, DenseWeight) else None


def pack_linear(stored: StoredLinear, dtype: torch.dtype) -> GpuLinear:
    """Lay a layer, or a stack of them, out for the kernel that takes it.

    What none takes is dequantized, which is logged.

    Args:
        stored: On the GPU.
        dtype: The model's float type.
    """
    weights, bias = stored.scheme.weights, stored.bias
    if weights is None or stored.scale is None:
        held = DenseWeight(stored.weight.to(dtype), None if bias is None else bias.to(dtype))
        return GpuLinear(held, InputFormat(dtype))
    inputs = rows_of(stored.scheme.activations, stored.input_scale, dtype)
    tensors = (stored.weight, stored.scale, stored.zero_point, bias)
    own = pack(*tensors, inputs, dtype, bits=weights.bits, group=stored.group)
    if isinstance(own, DenseWeight):
        others = len(stored.names) - 1
        log.warning(
            "%s%s: no GPU kernel takes %s of %s; it runs dequantized, with the same numbers",
            " + ".join(stored.names[0]),
            f" and {others} more" if others else "",
            stored.scheme.text,
            tuple(stored.weight.shape[-2:]),
        )
    return GpuLinear(own, inputs, stored.order)
