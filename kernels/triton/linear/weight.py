"""Weights of linear layers on a GPU: each is stored as its kernels want it, and runs itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.triton.common import Workspace, capability, require
from kernels.triton.experts import SortedRows
from kernels.triton.linear.launch import Product, result_rows, tile_for
from kernels.triton.linear.packing import BLOCK
from kernels.triton.tuning import Tile, bucket
from kernels.triton.versions import run_gluon


@dataclass(frozen=True)
class InputFormat:
    """How a linear layer wants the rows of its input.

    Attributes:
        dtype: int8, float8_e4m3fn or the model's float type.
        scale: fp32, one element, for all rows; None where they are scaled by their data, or not.
        group: Inputs of a row that share a scale of their own; None for the whole row.
        both: fp32 [2], `scale` and that of the rows of sink tokens, where these have one of their
            own; of experts [2 E], those of all experts before theirs of sink tokens.
        length: Elements of a row with zeros after its inputs, as many as the kernel reads; None
            where it reads the inputs alone.
    """

    dtype: torch.dtype
    scale: Tensor | None = None
    group: int | None = None
    length: int | None = None
    both: Tensor | None = None

    def scales_of(self, sinks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What rows are quantized with: the scales, and which of them is each row's, int32 [T].

        Args:
            sinks: int32 [T], 1 for the rows of sink tokens, 0 for others; None where none is.

        Returns:
            (scales, indices), the latter None where all rows have one scale.
        """
        return (self.scale, None) if self.both is None or sinks is None else (self.both, sinks)


@dataclass(frozen=True)
class GpuWeight(ABC):
    """A weight [N, K] in the layout of its kernels, with its bias.

    Several of one shape may lie one after the other in memory: the first then stands for all, and
    sorted rows say which rows are whose.

    Attributes:
        SHORT_ROWS: Whether its kernels take rows without the zeros that fill the last run of 128
            inputs (`fits_short`).
    """

    SHORT_ROWS: ClassVar[bool] = False

    @property
    @abstractmethod
    def family(self) -> str:
        """Under which the tables of tiles know its kernel."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def takes_sorted_rows(self) -> bool:
        """Whether its kernel of few rows fits, which can take those of each expert."""
        return True

    @property
    def tallest_tile(self) -> int:
        """The most rows of a tile of sorted rows whose sums its kernel holds in registers."""
        return 64

    @property
    def gathers(self) -> bool:
        """Whether `rows` gives rows of it."""
        return False

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight as floats: [T, K] in `dtype` of ids int64 [T], where it `gathers`."""
        raise NotImplementedError(f"{self.family} gives no rows of its weight")

    def run(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        workspace: Workspace,
        dtype: torch.dtype = torch.bfloat16,
        sorted_rows: SortedRows | None = None,
        tile: Tile | None = None,
    ) -> Tensor:
        """x W^T + bias.

        Args:
            x: [M, K], contiguous, as the layer's `InputFormat` says; rows may be short
                (`fits_short`) where the weight has SHORT_ROWS.
            x_scale: fp32, one element, [M, 1] or [M, K / group]; None for float rows.
            workspace: Of the stream that this runs in.
            dtype: Of the result; int32 for an `exact` weight's sums as they are, without scales and
                bias.
            sorted_rows: Of a mixture of experts, which rows are whose: the rows of x are tokens or
                pairs, those of the result pairs.
            tile: How to cut the product; by default the device's table says, or a rule.

        Returns:
            [M, N] in `dtype`; sums in fp32 or exact int32.

        Raises:
            ValueError: a shape or type does not fit, or the workspace is too small.
        """
        self.check(x, x_scale)
        require(
            dtype.is_floating_point or (dtype == torch.int32 and self.exact),
            f"a result in {dtype} is asked for; needed is a float type, or int32 of a weight whose "
            f"sums are of integers alone, which those of {self.family} "
            f"{'are' if self.exact else 'are not'}",
        )
        rows = result_rows(x, sorted_rows)
        out = torch.empty((rows, self.size[0]), dtype=dtype, device=x.device)
        product = Product(x, x_scale, out, workspace, sorted_rows)
        tile = tile or self.tile(x, dtype, sorted_rows)
        if tile is not None and tile.persistent and rows:
            require(
                capability() == 90 and sorted_rows is None,
                f"{tile} is for sm_90, and for rows of one weight; this is sm_{capability()}",
            )
            many = partial(self.launch_many, product, tile)
            if run_gluon(f"{self.family} of many rows", many):
                return out  # else this Triton refuses it
            tile = self.plain_tile(x, dtype, sorted_rows)
        if tile is None:
            return self.by_library(x, x_scale, dtype)
        if rows:
            self.launch(product, tile)
        return out

    @abstractmethod
    def check(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Raise ValueError unless rows and their scales are what the kernel takes."""

    def tile(self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None) -> Tile | None:
        """How a product is cut; None where torch's library is ahead of the kernels."""
        return self.plain_tile(x, dtype, sorted_rows)

    def plain_tile(
        self, x: Tensor, dtype: torch.dtype, sorted_rows: SortedRows | None
    ) -> Tile | None:
        """The same if there were no kernel for many rows."""
        return self.few_rows_tile(x, sorted_rows)

    @property
    def exact(self) -> bool:
        """Whether sums are of integers alone, so that no order of theirs changes a bit."""
        return False

    @property
    def output_scale(self) -> Tensor:
        """What an `exact` sum is multiplied by beside the scale of its row: fp32 [N].

        Raises:
            ValueError: sums are not of integers alone.
        """
        raise ValueError(f"sums of {self.family} are not of integers alone")

    def invariant_tile(self, x: Tensor) -> Tile:
        """A tile with which a row's sums have one order, whatever other rows there are.

        How the inputs are split does not depend on the rows then, how high a tile is alone does.
        """
        tallest = self.tallest_invariant_tile
        row = x.new_empty((1, x.shape[1]))  # x may have none, as of a prompt's chunk in the head
        low, own, high = (
            self.few_rows_tile(row.expand(min(bucket(rows), tallest), -1))
            for rows in (1, len(x), tallest)
        )
        return replace(own, splits=low.splits, inputs=min(low.inputs, high.inputs))

    @property
    def tallest_invariant_tile(self) -> int:
        """The most rows of a tile for which the kernel multiplies as it does for one row."""
        return 64

    def few_rows_tile(self, x: Tensor, sorted_rows: SortedRows | None = None) -> Tile:
        """How the kernel for few rows would cut a product."""
        return tile_for(self.family, x, *self.size, sorted_rows)

    @abstractmethod
    def launch(self, product: Product, tile: Tile) -> None:
        """Run the kernel for few rows, which takes any number of them."""

    def launch_many(self, product: Product, tile: Tile) -> None:
        """Run the kernel for many rows on Hopper, where there is one."""
        raise ValueError(f"{tile} is for many rows, for which {self.family} has no kernel")

    def by_library(self, x: Tensor, x_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same by torch's library."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroupedWeight(GpuWeight):
    """A weight in tiles of 64 outputs with scales of groups of inputs.

    Attributes:
        packed: The integers [K / 128, ...]; see the kernel.
        scale: [groups, N], fp16, bf16 or fp32; with zero points int32, which holds both.
        bias: fp32 [N] or None.
        group: Inputs that share a scale: 32, 64 or 128; 0 for all.
        zero_points: Whether there are any.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    group: int
    zero_points: bool

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.scale.shape[1], self.packed.shape[0] * BLOCK


def check_inputs(
    x: Tensor, types: Sequence[torch.dtype], inputs: int, *, short: bool = False
) -> None:
    """Raise ValueError unless x is contiguous, [M, inputs] and of one of some types; rows may be
    `short`."""
    names, found = " or ".join(str(dtype)[6:] for dtype in types), x.shape[-1]
    require(x.dtype in types and x.is_contiguous(), f"x is {x.dtype}; needed is contiguous {names}")
    fits = found == inputs or (short and fits_short(found, inputs))
    require(fits, f"x has {found} inputs, the weight {inputs}")


def fits_short(found: int, inputs: int) -> bool:
    """Whether kernels that take short rows read rows of `found` inputs as such of more: zeros are
    in the last run of 128 alone, and rows begin where the TMA unit reads."""
    return inputs - BLOCK < found <= inputs and found % 16 == 0


def check_input_scale(x_scale: Any, rows: int) -> None:
    """Raise ValueError unless there is one scale, or one for each row."""
    found = 0 if x_scale is None else x_scale.numel()
    require(found in (1, rows), f"{found} scales for {rows} rows of x")
