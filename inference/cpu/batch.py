"""The tensors of a step on a CPU: planned from its slices, executed without a look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.models.adapters import AdaptedLayer, number_of
from inference.scheduling.work import Work
from inference.transformers_code.state_rows import Piece, pieces_of
from kernels.cpu.native_ops import LoraTable
from kernels.ops import add_lora


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T of S sequences.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        slots: int64 [T], where K and V go in the cache.
        block_tables: int64 [S, blocks].
        query_start: int64 [S + 1].
        context_len: int64 [S].
        rows: int64 [R], the tokens whose logits are wanted.
        taps: int64 [n], blocks whose inputs are wanted, too; the number of blocks stands for the
            output of the last one. None without.
        hidden: [T, n, H], gets them.
        adapters: int64 [T], slot of each token's adapter, -1 for none; None where none has one.
        loras: Holds them; see `inference.cpu.loop.CpuAdapters`.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_len: Tensor
    rows: Tensor
    taps: Tensor | None = None
    hidden: Tensor | None = None
    adapters: Tensor | None = None
    loras: LoraTable | None = None

    def adapted(self, x: Tensor, y: Tensor, block: int, layer: AdaptedLayer) -> Tensor:
        """What a layer gives [T, N] of x [T, K], and what the tokens' adapters add."""
        if self.adapters is None or self.loras is None:
            return y
        return add_lora(x, y, self.adapters, self.loras, number_of(block, layer))

    def sinks(self, count: int) -> Tensor | None:
        """Which tokens are at the first `count` positions, bool [T]; None where none is."""
        own = self.positions < count
        return own if count and bool(own.any()) else None


@dataclass(frozen=True)
class StateBatch(Batch):
    """A step of a model that keeps recurrent states.

    Attributes:
        pieces: Its tokens as modules that keep a state take them.
    """

    pieces: Sequence[Piece] = ()


def plan_step(work: Work) -> Batch:
    """Lay out a step of the engine's model."""
    batch = plan_tokens(work)
    if work.batch.states is None:
        return batch
    return StateBatch(**vars(batch), pieces=pieces_of(work))


def plan_tokens(work: Work) -> Batch:
    """Lay out a step of what keeps no states; the rows of its logits are those of its slices, in
    order (`Work.rows`)."""
    own = work.laid_out()
    widest = int(work.batch.held[work.places].max())
    return Batch(
        ids=torch.from_numpy(own.ids),
        positions=torch.from_numpy(own.positions),
        slots=torch.from_numpy(own.slots),
        block_tables=torch.from_numpy(work.batch.tables[work.places, :widest].astype(np.int64)),
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(work.counts)])),
        context_len=torch.from_numpy(own.contexts),
        rows=torch.from_numpy(work.wanted),
    )
