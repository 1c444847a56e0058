"""Linear layers of a rank on a GPU. Column-parallel ones run as on one GPU; row-parallel ones give
a partial sum (`inference.gpu.ranks.Partial`); those that gather their inputs give some outputs.

With static int8 inputs and sums of integers alone the parts are integers, and the sum has the bits
of one GPU. Other parts are floats of the model's type, which are added in fp32; the scale of a
token that arrives is then that of the rank's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from formats.errors import EngineError
from inference.gpu.layers import GpuLinear, as_wanted, pack_linear
from inference.gpu.ranks import Partial, Reducer
from inference.models.read import StoredLinear
from inference.parallel.group import Group
from kernels.triton.collective.scaling import Scaling
from kernels.triton.linear.weight import InputFormat


@dataclass(frozen=True)
class SummedGpuLinear:
    """A row-parallel layer: each rank has some of its inputs.

    Attributes:
        own: The rank's part; it has the bias on the first rank alone, and none of integers.
        scaling: What makes floats of its integers; None where it gives floats.
        reducer: Sums parts.
    """

    own: GpuLinear
    scaling: Scaling | None
    reducer: Reducer

    def __call__(
        self, x: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Partial:
        """The rank's part of [T, N], of its inputs [T, K] float."""
        return self.run(*as_wanted(x, self.rows, sinks), dtype or x.dtype)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Partial:
        """The same of rows that are as the layer wants them."""
        scaling = self.scaling
        if scaling is not None and scales is not None:  # of each row, where there are sink tokens
            scaling = replace(scaling, x_scale=scales)
        kind = dtype if scaling is None else torch.int32
        return Partial(self.own.run(rows, scales, kind), scaling, self.reducer)

    def with_own(self, change: Callable[[GpuLinear], GpuLinear]) -> SummedGpuLinear:
        """See `inference.gpu.ranks.OfSeveralRanks`."""
        if self.scaling is None:
            raise EngineError(
                "invariant: parts of sums over ranks are floats here, which are added in an order "
                "that depends on the batch. Take a scheme with static int8 inputs, such as a8w8c8, "
                "or leave invariant out"
            )
        return self  # integers: any order is the same

    @property
    def rows(self) -> InputFormat:
        """How its input is given to `run`."""
        return self.own.rows

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    gathers, matrix = False, None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """No layer that is summed is an embedding."""
        raise NotImplementedError


@dataclass(frozen=True)
class GatheredGpuLinear:
    """A layer of which each rank has some outputs, and whose inputs the ranks have parts of.

    Attributes:
        own: The rank's outputs, of all inputs.
        inputs: Inputs that each rank has.
        outputs: Outputs of each rank.
        group: All ranks.
        rows: Floats: all inputs are there before they are quantized.
    """

    own: GpuLinear
    inputs: Sequence[int]
    outputs: Sequence[int]
    group: Group
    rows: InputFormat

    def __call__(
        self, x: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in `dtype`, by default the type of `x`."""
        y = self.own(self.group.side_by_side(x, self.inputs), sinks, dtype or x.dtype)
        return self.group.side_by_side(y, self.outputs)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same."""
        return self(rows, dtype=dtype)

    def with_own(self, change: Callable[[GpuLinear], GpuLinear]) -> GatheredGpuLinear:
        """See `inference.gpu.ranks.OfSeveralRanks`."""
        return replace(self, own=change(self.own))

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    gathers, matrix = False, None

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """No layer that is gathered is an embedding."""
        raise NotImplementedError


@dataclass(frozen=True)
class GpuHeadPart:
    """The head of a rank: the logits of its tokens, which the first rank puts together.

    Attributes:
        own: The rank's rows.
        tokens: How many each rank has.
        group: All ranks.
    """

    own: GpuLinear
    tokens: Sequence[int]
    group: Group

    def __call__(
        self, x: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """[R, H] float -> [R, vocabulary] on the first rank; on others their own tokens'."""
        return self.run(*as_wanted(x, self.rows, sinks), dtype or x.dtype)

    def run(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same of rows that are as the layer wants them."""
        return self.group.on_first(self.own.run(rows, scales, dtype), self.tokens)

    def with_own(self, change: Callable[[GpuLinear], GpuLinear]) -> GpuHeadPart:
        """See `inference.gpu.ranks.OfSeveralRanks`."""
        return replace(self, own=change(self.own))

    @property
    def rows(self) -> InputFormat:
        """How its input is given to `run`."""
        return self.own.rows

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as it lies."""
        return self.own.gathers

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the rank's weight as floats, by their place in it."""
        return self.own.gather(ids, dtype)

    @property
    def matrix(self) -> Tensor | None:
        """The rank's weight, where it is not quantized."""
        return self.own.matrix


def summed(
    stored: StoredLinear, dtype: torch.dtype, reducer: Reducer, *, first: bool
) -> SummedGpuLinear:
    """Pack the rank's part of a layer of which each has some inputs.

    Args:
        stored: The part.
        dtype: The model's float type.
        reducer: Sums parts.
        first: Whether this is the first rank, which adds the bias where parts are floats.
    """
    plain = pack_linear(replace(stored, bias=None), dtype)
    if stored.input_scale is not None and plain.weight.exact and plain.outputs is None:
        scale = plain.weight.output_scale.float().reshape(-1).contiguous()
        bias = None if stored.bias is None else stored.bias.float().contiguous()
        return SummedGpuLinear(plain, Scaling(stored.input_scale, scale, bias), reducer)
    own = pack_linear(stored, dtype) if first and stored.bias is not None else plain
    return SummedGpuLinear(own, None, reducer)
