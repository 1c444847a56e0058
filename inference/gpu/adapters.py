"""The adapters of a decoder on a GPU: tables that the kernels read, by slot.

Graphs hold the addresses of the tables. Room for more slots or higher ranks, or the first adapter
of a kind of layers, makes new ones, and `version` says that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from formats.errors import EngineError
from inference.gpu.layers import GpuLinear
from inference.gpu.memory import OF_WEIGHTS, memory_for
from inference.models.adapters import AdaptedLayer, AdapterParts, linear_of, outputs_of
from inference.models.decoder import Decoder
from inference.models.parts import Layer
from kernels.triton.linear.lora import RANKS, LoraStack, add_lora

LEAST_SLOTS = 4
LEAST_RANK = 16


@dataclass(frozen=True)
class BlockAdapters:
    """The adapters of a block, and which the rows of a step run with.

    Attributes:
        slots: int32 [T], -1 for none.
        stacks: By layer; a layer that no adapter changes has none.
        invariant: Whether a row's bits are the same in any step.
    """

    slots: Tensor
    stacks: dict[AdaptedLayer, LoraStack]
    invariant: bool

    def add(self, layer: AdaptedLayer, x: Tensor, scales: Tensor | None, y: Tensor) -> None:
        """Add what the rows' adapters make of x, as the layer reads it, to what it gives, y."""
        if layer in self.stacks:  # the layer's own kernel is between x and this
            own = self.stacks[layer]
            add_lora(x, scales, y, self.slots, own, ready=True, invariant=self.invariant)


def run_adapted(
    linear: GpuLinear,
    layer: AdaptedLayer,
    rows: Tensor,
    scales: Tensor | None,
    dtype: torch.dtype,
    loras: BlockAdapters | None,
) -> Tensor:
    """`GpuLinear.run` of a layer, and what the rows' adapters add, if they run with any."""
    y = linear.run(rows, scales, dtype)
    if loras is not None:
        loras.add(layer, rows, scales, y)
    return y


class GpuAdapters:
    """Holds adapters; see `inference.models.adapters.AdapterStore`.

    Args:
        model: The decoder that they are of.
        device: The GPU.

    Attributes:
        version: Another number once tables are where they were not.
    """

    def __init__(self, model: Decoder[GpuLinear, Any], device: torch.device) -> None:
        self._model, self._device, self.version = model, device, 0
        self._held: dict[int, AdapterParts] = {}
        self._stacks: list[dict[AdaptedLayer, LoraStack]] = [{} for _ in model.layers]
        self._room = (LEAST_SLOTS, LEAST_RANK)

    def of(self, block: int, slots: Tensor, *, invariant: bool) -> BlockAdapters:
        """Those of a block, for rows that run with the adapters in `slots`, int32 [T]."""
        return BlockAdapters(slots, self._stacks[block], invariant)

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Hold an adapter in a slot.

        Raises:
            EngineError: memory is too small.
        """
        with memory_for("an adapter", self._device, 0, OF_WEIGHTS):
            self._make_room(slot, parts)
            self._held[slot] = parts
            self._fill(slot)

    def _make_room(self, slot: int, parts: AdapterParts) -> None:
        """Have tables of that many slots, of that rank, for these layers."""
        slots, rank = self._room
        ranks = [len(part.a) for own in parts.values() for part in own]
        if max(ranks, default=0) > RANKS[-1]:
            raise EngineError(
                f"the adapter has rank {max(ranks)}, and GPUs run up to {RANKS[-1]}; run it on a "
                "CPU, or merge it: `ptq quantize MODEL --adapter FOLDER`"
            )
        room = (_power(max(slots, slot + 1)), _power(max([rank, *ranks])))
        known: set[tuple[int, AdaptedLayer]] = {
            (i, layer) for i, own in enumerate(self._stacks) for layer in own
        }
        if room == self._room and known.issuperset(parts):
            return
        stacks: list[dict[AdaptedLayer, LoraStack]] = [{} for _ in self._stacks]
        for block, layer in known.union(parts):
            stacks[block][layer] = self._empty(self._model.layers[block], layer, *room)
        self._room, self._stacks, self.version = room, stacks, self.version + 1
        for held in self._held:
            self._fill(held)

    def _empty(
        self, own: Layer[GpuLinear, Any], layer: AdaptedLayer, slots: int, rank: int
    ) -> LoraStack:
        linear = linear_of(own, layer)
        outputs = linear.outputs or linear.weight.size[0]
        inputs = linear.weight.size[1] - linear.missing
        sizes = outputs_of(self._model.config, layer, outputs)
        return LoraStack.empty(slots, sizes, rank, inputs, self._model.dtype, self._device)

    def _fill(self, slot: int) -> None:
        for stack in (stack for own in self._stacks for stack in own.values()):
            stack.clear(slot)
        for (block, layer), own in self._held[slot].items():
            for part in own:
                stack = self._stacks[block][layer]
                stack.put(slot, part.index, part.a.to(self._device), part.b.to(self._device))


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
