"""Linear layers of a rank on a CPU. Column-parallel ones run as on one rank; row-parallel ones give
a partial sum, and an all-reduce adds these; those that gather their inputs give some outputs.

What is rounded to integers is rounded as on one rank: a scale that follows from a token's data is
that of all ranks' data. With int8 inputs and one scale for an output the parts are integers, whose
sum is scaled once: it has the bits of one rank. Sums of floats are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.cpu.layers import Linear, pack_linear, static_integers
from inference.models.read import StoredLinear
from inference.parallel.group import Group
from kernels.cpu.weights import Weight, pack_quantized_weight
from kernels.numerics import (
    FP8,
    INT8,
    QuantizedType,
    block_absmax,
    choose_scale,
    fake_quantize,
    quantize,
)
from kernels.ops import fake_quantize_fp8, linear
from kernels.reference import RUN

StaticScales = tuple[Tensor | None, Tensor | None]  # of most rows, and of those of sink tokens


@dataclass(frozen=True)
class SummedLinear:
    """A row-parallel layer: each rank has some of its inputs.

    Attributes:
        own: The rank's part, which gives its share of the sum, without a bias.
        bias: fp32 [N], added to the sum, or None.
        group: All ranks.
    """

    own: Linear
    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in the type of `x`."""
        return _finished(self.group.sum(self._part(x, sinks)), self.bias, x.dtype)

    def _part(self, x: Tensor, sinks: Tensor | None) -> Tensor:
        """The rank's share, fp32."""
        own, spec = self.own, self.own.activations
        if spec is None:
            return linear(x, own.weight)
        if spec.dtype == "fp8_e4m3":
            if own.input_scale is not None:
                return own(x, sinks)  # no scale is of other ranks' data
            if spec.group == -1:
                seen = fake_quantize(x, token_scale(x, self.group, FP8), FP8)
            else:
                seen = fake_quantize_fp8(x, None, spec.group)
            return linear(seen, own.weight)
        xq, scale = integers(x, (own.input_scale, own.sink_scale), self.group, sinks)
        return linear(xq, own.weight, scale)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    gathers, matrix = False, None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """No layer that is summed is an embedding."""
        raise NotImplementedError


@dataclass(frozen=True)
class SummedIntegers:
    """A row-parallel layer of int8 inputs and weights with one scale for an output.

    Attributes:
        runs: Its weight in runs of inputs so short that sums over them are exact in fp32, without
            scales.
        scale: fp32 [N], of the weight.
        scales: Of the input, fp32, one element, and of sink tokens' rows; None where each token is
            scaled when it arrives, and where sink tokens have the same.
        bias: fp32 [N], added to the sum, or None.
        group: All ranks.
    """

    runs: Sequence[Weight]
    scale: Tensor
    scales: StaticScales
    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in the type of `x`."""
        xq, x_scale = integers(x, self.scales, self.group, sinks)
        one = torch.ones(1)
        parts = (
            linear(part, run, one).to(torch.int32)
            for part, run in zip(xq.split(RUN, dim=1), self.runs, strict=True)
        )
        total = self.group.sum(torch.as_tensor(sum(parts)))
        return _finished(total.float() * (x_scale * self.scale), self.bias, x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(run.nbytes for run in self.runs) + self.scale.nbytes

    gathers, matrix = False, None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """No layer that is summed is an embedding."""
        raise NotImplementedError


@dataclass(frozen=True)
class GatheredLinear:
    """A layer of which each rank has some outputs, and whose inputs the ranks have parts of.

    Attributes:
        own: The rank's outputs, of all inputs.
        inputs: Inputs that each rank has.
        outputs: Outputs of each rank.
        group: All ranks.
    """

    own: Linear
    inputs: Sequence[int]
    outputs: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in the type of `x`."""
        y = self.own(self.group.side_by_side(x, self.inputs), sinks)
        return self.group.side_by_side(y, self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    gathers, matrix = False, None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """No layer that is gathered is an embedding."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeadPart:
    """The head of a rank: the logits of its tokens, which the first rank puts together.

    Attributes:
        own: The rank's rows.
        tokens: How many each rank has.
        group: All ranks.
    """

    own: Linear
    tokens: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[R, H] float -> fp32 [R, vocabulary] on the first rank; on others their own tokens'."""
        return self.group.on_first(self.own(x, sinks).float(), self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it lies in memory."""
        return self.own.gathers

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the rank's weight as floats, by their place in it."""
        return self.own.gather(ids, dtype)

    @property
    def matrix(self) -> Tensor | None:
        """The rank's weight, where it lies in memory as a matrix."""
        return self.own.matrix


def summed(stored: StoredLinear, dtype: torch.dtype, group: Group) -> SummedLinear | SummedIntegers:
    """Pack the rank's part of a layer of which each has some inputs."""
    weights, inputs = stored.scheme.weights, stored.scheme.activations
    integral = weights is not None and weights.dtype in ("int8", "int4")
    whole = stored.group is None and stored.zero_point is None
    if not (integral and whole and inputs is not None and inputs.dtype == "int8"):
        return SummedLinear(pack_linear(replace(stored, bias=None), dtype), stored.bias, group)
    assert weights is not None
    assert stored.scale is not None
    one = torch.ones(len(stored.weight), 1)
    runs = [
        pack_quantized_weight(run, one, weights.dtype, integer_inputs=True)
        for run in stored.weight.split(RUN, dim=1)
    ]
    scale = stored.scale.float().reshape(-1).contiguous()
    scales = (stored.input_scale, stored.sink_scale)
    return SummedIntegers(runs, scale, scales, stored.bias, group)


def integers(
    x: Tensor, scales: StaticScales, group: Group, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a layer's input as int8, and their scales: static ones, or of each whole row."""
    static, of_sinks = scales
    if static is not None:
        return static_integers(x, static, of_sinks, sinks)
    scale = token_scale(x, group, INT8)
    return quantize(x, scale), scale


def token_scale(x: Tensor, group: Group, kind: QuantizedType) -> Tensor:
    """The scale of each row, of which the ranks have parts: fp32 [T, 1]."""
    return choose_scale(group.largest(block_absmax(x, (1, -1))), kind)


def _finished(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias).to(dtype)
