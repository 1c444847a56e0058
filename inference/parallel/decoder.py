"""A rank's part of a decoder, loaded: a decoder with fewer heads, whose layers ask other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from formats.checkpoint.part import CheckpointPart
from formats.checkpoint.read import Checkpoint
from formats.families.names import EMBEDDING, HEAD
from inference.cpu.layers import CpuExperts, Linear, pack_linear
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.layers import L, LayerFactory, X
from inference.models.read import StoredLinear
from inference.models.shapes import check_shapes
from inference.parallel.cpu_layers import (
    GatheredLinear,
    HeadPart,
    SummedIntegers,
    SummedLinear,
    summed,
)
from inference.parallel.group import Group
from inference.parallel.shard import Shard

CpuPart = Linear | SummedLinear | SummedIntegers | GatheredLinear | HeadPart


class ShardDecoder(Decoder[L, X]):
    """A rank's part of a decoder; see `inference.models.decoder.Decoder`.

    Args:
        checkpoint: The whole.
        shard: What the rank holds of it.
        factory: Makes its layers.
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
        part = CheckpointPart(checkpoint, shard.cuts, shard.vectors)
        super().__init__(part, factory, longest, shard.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states before the first block: each token's come from the rank that has it."""
        places = ids - self._own.first
        elsewhere = (places < 0) | (places >= self._own.count)
        found = super().embed(places.clamp(0, self._own.count - 1))
        return self._group.sum(found.masked_fill(elsewhere[:, None], 0))


class CpuFactory:
    """Makes a rank's layers on a CPU; see `inference.models.layers.LayerFactory`.

    Args:
        dtype: Of activations and of float weights.
        shard: What the rank holds.
        group: All ranks.
        check: Raises where another rank has failed.
    """

    device = torch.device("cpu")

    def __init__(
        self, dtype: torch.dtype, shard: Shard, group: Group, check: Callable[[], None]
    ) -> None:
        self.dtype, self._shard, self._group, self._check = dtype, shard, group, check

    def check(self, config: ModelConfig) -> None:
        """Every part that is cut runs here."""

    def linear(self, stored: StoredLinear) -> CpuPart:
        """Pack a layer, as the rank has it."""
        self._check()
        self._group.progress.count += 1
        module, shard = stored.names[0][0], self._shard
        if module in (HEAD, EMBEDDING):
            tokens = [span.count for span in shard.vocabulary]
            return HeadPart(pack_linear(stored, self.dtype), tokens, self._group)
        if module in shard.gathered:
            inputs, outputs = ([span.count for span in spans] for spans in shard.gathered[module])
            return GatheredLinear(pack_linear(stored, self.dtype), inputs, outputs, self._group)
        cut = shard.cuts.get(module)
        if cut is not None and cut.columns is not None:
            return summed(stored, self.dtype, self._group)
        return pack_linear(stored, self.dtype)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> CpuExperts:
        """Pack the same layer of each expert."""
        each = [self.linear(one) for stack in stacks for one in stack.unstacked()]
        return CpuExperts(cast(list[Linear], each))  # they are called, and no more


def check_whole(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare a checkpoint's tensors with its configuration, before parts of it are read.

    Raises:
        CheckpointError: one has another shape; it is named.
    """
    check_shapes(checkpoint, config)
