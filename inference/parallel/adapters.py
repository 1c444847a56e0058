"""Adapters on several ranks: each holds its part, and all hold the same ones.

    q, k, v, gate, up   A whole; B cut by rows, as the layer's outputs are
    o, down             A cut by columns, as the layer's inputs are; B whole

Of o and down A x is a sum over ranks, of r numbers a row, and every rank multiplies it by B once it
has the layer's own sum. An adapter that one rank has no memory for is given up by all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from formats.errors import EngineError
from formats.families.registry import block_names
from inference.cpu.batch import Batch
from inference.cpu.loop import CpuAdapters
from inference.models.adapters import (
    ADAPTED,
    ROW_PARALLEL,
    AdaptedLayer,
    AdapterPart,
    AdapterParts,
    AdapterStore,
    modules_of,
    number_of,
)
from inference.parallel.communication import Group, HoldAdapter
from inference.parallel.part import RankLoader
from inference.parallel.ranks import Ranks
from inference.parallel.shard import Shard
from kernels.cpu.native_ops import LoraTable
from kernels.ops import add_lora
from kernels.reference import LowRank


def cut_parts(parts: AdapterParts, loader: RankLoader) -> AdapterParts:
    """What a rank holds of an adapter's parts."""
    blocks, found = block_names(loader.checkpoint.config), dict[Any, list[AdapterPart]]()
    for (block, layer), own in parts.items():
        modules = modules_of(loader.shape, blocks[block], dense=True)[layer]
        found[block, layer] = [_cut(part, modules[part.index], loader.shard) for part in own]
    return found


def _cut(part: AdapterPart, module: str, shard: Shard) -> AdapterPart:
    if module in shard.gathered:  # whose outputs the ranks put together
        inputs, _ = shard.gathered[module]
        return replace(part, a=part.a[:, inputs[shard.rank].slice].contiguous())
    cut = shard.cuts[module]
    if cut.columns is not None:
        return replace(part, a=part.a[:, cut.columns.slice].contiguous())
    assert cut.rows is not None
    return replace(part, b=part.b[cut.rows.slice].contiguous())


class RankStore(AdapterStore, Protocol):
    """The parts of adapters on a rank's device."""

    def take_back(self, slot: int) -> None:
        """Be as before the last `put`, which another rank may have no memory for."""
        ...


def hold(loader: RankLoader, own: RankStore, task: HoldAdapter) -> EngineError | None:
    """Hold a part of an adapter as all ranks do; gives why none does, where one cannot.

    Args:
        loader: What the rank runs.
        own: Its parts of adapters.
    """
    error = None
    try:
        own.put(task.slot, cut_parts(task.parts, loader))
    except EngineError as found:
        error = found
    if loader.host.smallest(int(error is None)):
        return None
    own.take_back(task.slot)
    return error or EngineError(
        "adapter: another rank has no memory for it; unload one, or lower kv_blocks"
    )


@dataclass(frozen=True)
class FirstAdapters(AdapterStore):
    """The adapters of all ranks, on the first.

    Attributes:
        loader: What that runs.
        own: Its parts.
        ranks: The others.
    """

    loader: RankLoader
    own: RankStore
    ranks: Ranks

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Have all ranks hold an adapter in a slot.

        Raises:
            EngineError: the memory of one is too small; none holds it then.
        """
        task = HoldAdapter(slot, parts)
        with self.ranks.together("loading an adapter"):
            self.ranks.send(task)
            error = hold(self.loader, self.own, task)
        if error is not None:
            raise error


class CpuRankAdapters(CpuAdapters):
    """A rank's parts on a CPU. The compiled kernels make A x of o and down by an identity in the
    place of B, and what B makes of the sum by one in the place of A.

    Args:
        model: The rank's part of the decoder.
        group: All ranks.
    """

    def __init__(self, model: Any, group: Group) -> None:
        super().__init__(model)
        self._group, self._after = group, LoraTable(len(model.layers) * len(ADAPTED))

    @override
    def put(self, slot: int, parts: AdapterParts) -> None:
        super().put(slot, parts)
        rows = {key: part for key, (part, *_) in parts.items() if key[1] in ROW_PARALLEL}
        after = {
            number_of(*key): [LowRank.of(torch.eye(len(part.a)), part.b, 0, self._dtype(*key))]
            for key, part in rows.items()
        }
        self._after.put(slot, after)

    def take_back(self, slot: int) -> None:
        """Hold nothing in a slot."""
        self.put(slot, {})

    @override
    def with_slots(self, batch: Batch, slots: Tensor) -> Batch:
        return replace(batch, adapters=slots)  # `RankBatch` adds them, on every rank

    @override
    def _laid_out(self, block: int, layer: AdaptedLayer, part: AdapterPart) -> LowRank:
        if layer in ROW_PARALLEL:
            part = replace(part, b=torch.eye(len(part.a)))
        return super()._laid_out(block, layer, part)

    def added(
        self, x: Tensor, y: Tensor, batch: RankBatch, block: int, layer: AdaptedLayer
    ) -> Tensor:
        """What a layer gives [T, N] of the rank's x [T, K], and what the tokens' adapters add."""
        number, slots = number_of(block, layer), batch.adapters
        assert slots is not None
        if layer not in ROW_PARALLEL:
            return add_lora(x, y, slots, self.table, number)
        ranks = (part.rank for slot in batch.used for part in self._after.of(slot, number))
        widest = max(ranks, default=0)
        if not widest:
            return y
        u = add_lora(x, torch.zeros(len(x), widest), slots, self.table, number)
        return add_lora(self._group.sum(u), y, slots, self._after, number)


@dataclass(frozen=True)
class RankBatch(Batch):
    """A step with adapters, of which the rank has parts.

    Attributes:
        own: The parts.
        used: The slots that its tokens name.
    """

    own: CpuRankAdapters | None = None
    used: Collection[int] = ()

    @classmethod
    def of(cls, batch: Batch, own: CpuRankAdapters) -> RankBatch:
        """Of a step whose tokens name slots."""
        assert batch.adapters is not None
        used = [slot for slot in batch.adapters.unique().tolist() if slot >= 0]
        return cls(**vars(batch), own=own, used=used)

    @override
    def adapted(self, x: Tensor, y: Tensor, block: int, layer: AdaptedLayer) -> Tensor:
        assert self.own is not None
        return self.own.added(x, y, self, block, layer)
