"""A rank's part of a decoder: fewer heads, and layers that communicate with other ranks.

    column-parallel   some of the outputs, of all inputs: a device's own layer, no communication
    row-parallel      some of the inputs; an all-reduce adds the partial sums
    gathered          some of the outputs, of inputs that the ranks have parts of
    head              the logits of some tokens, which rank 0 gathers

How partial sums are added is a device's own: `inference.parallel.cpu`, `inference.parallel.gpu`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from formats.checkpoint.part import checkpoint_part
from formats.checkpoint.read import Checkpoint
from formats.families.names import EMBEDDING, HEAD
from inference.backend import Backend
from inference.models.decoder import Decoder
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear
from inference.parallel.group import Group
from inference.parallel.shard import Shard


class ShardDecoder(Decoder[L, X]):
    """A rank's part of a decoder; see `inference.models.decoder.Decoder`.

    Args:
        checkpoint: The whole.
        shard: What the rank holds of it.
        group: All ranks.
        longest: Most tokens that a request may have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: Shard,
        factory: LayerFactory[L, X],
        group: Group,
        longest: int,
    ) -> None:
        self._own, self._group = shard.vocabulary[shard.rank], group
        part = checkpoint_part(checkpoint, shard.cuts, shard.vectors)
        super().__init__(part, factory, longest, shard.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states before the first block: each token's come from the rank that has it."""
        rows = ids - self._own.first
        elsewhere = (rows < 0) | (rows >= self._own.count)
        found = super().embed(rows.clamp(0, self._own.count - 1))
        return self._group.sum(found.masked_fill(elsewhere[:, None], 0))


@dataclass(frozen=True)
class RankLayer:
    """A layer of which each rank has a part; see `inference.models.layers.LinearLayer`.

    Attributes:
        own: The rank's part, a layer of its device.
    """

    own: Any

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.own.nbytes

    @property
    def quantized(self) -> bool:
        """Whether its weight is."""
        return self.own.quantized

    @property
    def gathers(self) -> bool:
        """Whether `gather` gives rows of the weight as stored in memory."""
        return self.own.gathers

    @property
    def matrix(self) -> Tensor | None:
        """The rank's weight, where it is stored as a matrix."""
        return self.own.matrix

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the rank's weight as floats, by their index in it."""
        return self.own.gather(ids, dtype)

    def with_own(self, change: Callable[[Any], Any]) -> Self:
        """The same layer with another part of this rank."""
        return replace(self, own=change(self.own))


@dataclass(frozen=True)
class Gathered(RankLayer):
    """A layer of which each rank has some outputs, and whose inputs the ranks have parts of.

    Attributes:
        inputs: Inputs of each rank.
        outputs: Outputs of each rank.
        group: All ranks.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None, *dtype: torch.dtype) -> Tensor:
        """[T, the rank's inputs] float -> [T, N] in `dtype`, by default the type of `x`."""
        y = self.own(self.group.side_by_side(x, self.inputs), sinks, *dtype)
        return self.group.side_by_side(y, self.outputs)


@dataclass(frozen=True)
class Head(RankLayer):
    """The head of a rank: the logits of its tokens, which the first rank puts together.

    Attributes:
        tokens: Tokens of each rank.
        group: All ranks.
    """

    tokens: Sequence[int]
    group: Group

    def __call__(self, x: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[R, H] float -> fp32 [R, vocabulary] on the first rank; on others their own tokens'."""
        return self.group.on_first(self.own(x, sinks).float(), self.tokens)


class RankFactory(ABC):
    """Makes a rank's layers; see `inference.models.layers.LayerFactory`.

    Args:
        inner: The backend of the rank's device.
        shard: What the rank holds.
        group: All ranks.
        check: Raises where another rank has failed.
    """

    def __init__(self, inner: Backend, shard: Shard, group: Any, check: Callable[[], None]) -> None:
        self._inner, self._shard, self._group, self._check = inner, shard, group, check
        self.device, self.dtype = inner.device, inner.dtype
        self.same_bits, self.check = inner.same_bits, inner.check
        self.functions = inner.functions

    def linear(self, stored: StoredLinear) -> Any:
        """Pack a layer, as the rank has it."""
        self._check()
        self._group.progress.count += 1
        shard, module = self._shard, stored.names[0][0]
        if module in (HEAD, EMBEDDING):
            tokens = [span.count for span in shard.vocabulary]
            return self.head(self._inner.linear(stored), tokens)
        if module in shard.gathered:
            inputs, outputs = ([span.count for span in own] for own in shard.gathered[module])
            return self.gathered(self._inner.linear(stored), inputs, outputs)
        cut = shard.cuts.get(module)
        if cut is not None and cut.columns is not None:
            return self.row_parallel(stored)
        return self._inner.linear(stored)

    def head(self, own: Any, tokens: Sequence[int]) -> Head:
        """The head, of which the rank has so many tokens."""
        return Head(own, tokens, self._group)

    def gathered(self, own: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Gathered:
        """A layer that reads the inputs of all ranks."""
        return Gathered(own, inputs, outputs, self._group)

    @abstractmethod
    def row_parallel(self, stored: StoredLinear) -> RankLayer:
        """Pack the rank's part of a layer of which each has some inputs."""

    @abstractmethod
    def experts(self, stacks: Iterator[StoredLinear], count: int) -> Any:
        """Pack the same layer of each expert."""
