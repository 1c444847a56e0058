"""A rank's part of a decoder, loaded: fewer heads, and layers that communicate with other ranks."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from formats.checkpoint.part import checkpoint_part
from formats.checkpoint.read import Checkpoint
from formats.families.names import EMBEDDING, HEAD
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
        part = checkpoint_part(checkpoint, shard.cuts, shard.vectors)
        super().__init__(part, factory, longest, shard.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states before the first block: each token's come from the rank that has it."""
        places = ids - self._own.first
        elsewhere = (places < 0) | (places >= self._own.count)
        found = super().embed(places.clamp(0, self._own.count - 1))
        return self._group.sum(found.masked_fill(elsewhere[:, None], 0))


class Kind(Enum):
    """How a layer is cut.

    Attributes:
        OWN: The rank has all of it, or some of its outputs (column-parallel), and communicates
            nothing.
        HEAD: It has the outputs of some tokens, which rank 0 gathers.
        SUMMED: It has some of the inputs (row-parallel); results are added over ranks.
        GATHERED: It has some of the outputs, and reads the inputs of all ranks.
    """

    OWN = "own"
    HEAD = "head"
    SUMMED = "summed"
    GATHERED = "gathered"


def kind_of(stored: StoredLinear, shard: Shard) -> Kind:
    """How a rank has a layer."""
    module = stored.names[0][0]
    if module in (HEAD, EMBEDDING):
        return Kind.HEAD
    if module in shard.gathered:
        return Kind.GATHERED
    cut = shard.cuts.get(module)
    return Kind.SUMMED if cut is not None and cut.columns is not None else Kind.OWN


def sizes_of(stored: StoredLinear, shard: Shard) -> tuple[list[int], list[int]]:
    """Inputs and outputs of each rank of a layer that is gathered."""
    inputs, outputs = shard.gathered[stored.names[0][0]]
    return [span.count for span in inputs], [span.count for span in outputs]
