"""The adapters of a decoder on a GPU: tables that the kernels read, by slot.

Graphs hold the addresses of the tables. Room for more slots or higher ranks, or the first adapter
of a kind of layers, makes new ones, and `version` says that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from formats.errors import EngineError
from inference.gpu.layers import GpuLinear
from inference.gpu.memory import OF_WEIGHTS, memory_for
from inference.gpu.ranks import Partial, StepRanks
from inference.models.adapters import ROW_PARALLEL, AdaptedLayer, AdapterParts, outputs_of
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from kernels.triton.linear.lora import FEW_ROWS, RANKS, LoraStack, add_lora
from kernels.triton.tuning import power_of_two

LEAST_SLOTS = 4
LEAST_RANK = 16
SPLITS = 16  # of sums over the inputs that all ranks have, so that these agree on them


@dataclass(frozen=True)
class BlockAdapters:
    """The adapters of a block, and which the rows of a step run with.

    Attributes:
        slots: int32 [T], -1 for none.
        stacks: By layer; a layer that no adapter changes has none.
        invariant: Whether a row's bits are the same in any step.
        ranks: Those that have parts of the block; None where one has all.
    """

    slots: Tensor
    stacks: dict[AdaptedLayer, LoraStack]
    invariant: bool
    ranks: StepRanks | None = None

    def add(
        self, layer: AdaptedLayer, x: Tensor, scales: Tensor | None, y: Tensor | Partial
    ) -> Tensor | Partial:
        """Add what the rows' adapters make of x, as the layer reads it, to what it gives, y.

        A part of a sum of floats gets this rank's part of that. A sum of integers has no place for
        it: it is made first, and A x is summed apart.
        """
        if layer not in self.stacks:
            return y
        own, floats = self.stacks[layer], isinstance(y, Partial) and y.scaling is None
        how: dict[str, Any] = {"invariant": self.invariant}
        if self.ranks is not None and layer in ROW_PARALLEL and not floats:
            y = y.summed() if isinstance(y, Partial) else y
            few = self.invariant or len(x) <= FEW_ROWS
            splits = max(1, SPLITS // self.ranks.count) if few else 1
            tile = replace(own.tile(len(x), self.invariant), splits=splits)
            how = {"tile": tile, "gather": self.ranks.gather}
        else:
            how["ready"] = True  # the layer's own kernel is between x and this
        to = y.x if isinstance(y, Partial) else y
        add_lora(x, scales, to, self.slots, own, **how)
        return y


def run_adapted(
    linear: GpuLinear,
    layer: AdaptedLayer,
    rows: Tensor,
    scales: Tensor | None,
    dtype: torch.dtype,
    loras: BlockAdapters | None,
) -> Any:
    """`GpuLinear.run` of a layer, and what the rows' adapters add, if they run with any."""
    y = linear.run(rows, scales, dtype)
    return y if loras is None else loras.add(layer, rows, scales, y)


@dataclass(frozen=True)
class Room:
    """What tables are for.

    Attributes:
        slots: Adapters.
        rank: The highest.
        layers: Outputs of each of the layers that run as one, and inputs, by block and layer.
    """

    slots: int
    rank: int
    layers: Mapping[tuple[int, AdaptedLayer], tuple[tuple[int, ...], int]] = field(
        default_factory=dict
    )

    def with_adapter(self, config: ModelConfig, slot: int, parts: AdapterParts) -> Room:
        """The same, with enough for an adapter in a slot.

        Raises:
            EngineError: its rank is too high.
        """
        ranks = [len(part.a) for own in parts.values() for part in own]
        if max(ranks, default=0) > RANKS[-1]:
            raise EngineError(
                f"the adapter has rank {max(ranks)}, and GPUs run up to {RANKS[-1]}; run it on a "
                "CPU, or merge it: `ptq quantize MODEL --adapter FOLDER`"
            )
        layers = dict(self.layers)
        for (block, layer), (part, *_) in parts.items():
            layers[block, layer] = outputs_of(config, layer, len(part.b)), part.a.shape[1]
        slots, rank = max(self.slots, slot + 1), max([self.rank, *ranks])
        return Room(power_of_two(slots), power_of_two(rank), layers)


class GpuAdapters:
    """Holds adapters; see `inference.models.adapters.AdapterStore`.

    Args:
        model: The decoder that they are of.
        ranks: Those that have parts of it; None where one has all.

    Attributes:
        version: Another number once tables are where they were not.
    """

    def __init__(
        self,
        model: Decoder[GpuLinear, Any],
        device: torch.device,
        ranks: StepRanks | None = None,
    ) -> None:
        self._model, self._device, self._ranks, self.version = model, device, ranks, 0
        self._held: dict[int, AdapterParts] = {}
        self._stacks: list[dict[AdaptedLayer, LoraStack]] = [{} for _ in model.layers]
        self._room = self._before = Room(LEAST_SLOTS, LEAST_RANK)

    def of(self, block: int, slots: Tensor, *, invariant: bool) -> BlockAdapters:
        """Those of a block, for rows that run with the adapters in `slots`, int32 [T]."""
        return BlockAdapters(slots, self._stacks[block], invariant, self._ranks)

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Hold an adapter in a slot.

        Raises:
            EngineError: memory is too small.
        """
        with memory_for("an adapter", self._device, 0, OF_WEIGHTS):
            self._before = self._room
            wanted = self._room.with_adapter(self._model.config, slot, parts)
            if wanted != self._room:
                self._move(wanted)
            self._held[slot] = parts
            self._fill(slot)

    def take_back(self, slot: int) -> None:
        """Be as before the last `put`, which another rank may have no memory for."""
        self._held.pop(slot, None)
        self._stacks = []  # whose memory is needed
        self._move(self._before)

    def _move(self, room: Room) -> None:
        """Have tables of another size."""
        stacks: list[dict[AdaptedLayer, LoraStack]] = [{} for _ in self._model.layers]
        for (block, layer), (outputs, inputs) in room.layers.items():
            stacks[block][layer] = LoraStack.empty(
                room.slots, outputs, room.rank, inputs, self._model.dtype, self._device
            )
        self._room, self._stacks, self.version = room, stacks, self.version + 1
        for held in self._held:
            self._fill(held)

    def _fill(self, slot: int) -> None:
        for stack in (stack for own in self._stacks for stack in own.values()):
            stack.clear(slot)
        for (block, layer), own in self._held[slot].items():
            for part in own:
                stack = self._stacks[block][layer]
                stack.put(slot, part.index, part.a.to(self._device), part.b.to(self._device))
