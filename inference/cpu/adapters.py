"""The adapters of a decoder on a CPU, in the table that its kernels read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inference.cpu.batch import Batch
from inference.cpu.layers import CpuExperts, Linear
from inference.models.adapters import (
    ADAPTED,
    AdaptedLayer,
    AdapterPart,
    AdapterParts,
    linear_of,
    number_of,
    outputs_of,
)
from inference.models.decoder import Decoder
from kernels.cpu.lora import LoraTable
from kernels.low_rank import LowRank


class CpuAdapters:
    """Holds adapters; see `inference.models.adapters.AdapterStore`.

    Args:
        model: The decoder that they are of.

    Attributes:
        table: The layers of `ADAPTED` of one block after another.
    """

    def __init__(self, model: Decoder[Linear, CpuExperts]) -> None:
        self._model = model
        self.table = LoraTable(len(model.layers) * len(ADAPTED))

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Hold an adapter in a slot: in bf16 beside weights that are quantized."""
        layers = {
            number_of(block, layer): [self._laid_out(block, layer, part) for part in own]
            for (block, layer), own in parts.items()
        }
        self.table.put(slot, layers)

    def with_slots(self, batch: Batch, slots: Tensor) -> Batch:
        """A step whose tokens run with the adapters in `slots`, int64 [T]."""
        return replace(batch, adapters=slots, loras=self.table)

    def _laid_out(self, block: int, layer: AdaptedLayer, part: AdapterPart) -> LowRank:
        outputs = outputs_of(self._model.config, layer, len(part.b))
        first = sum(outputs[: part.index])
        return LowRank.of(part.a, part.b, first, self._dtype(block, layer))

    def _dtype(self, block: int, layer: AdaptedLayer) -> torch.dtype:
        quantized = linear_of(self._model.layers[block], layer).quantized
        return torch.bfloat16 if quantized else torch.float32
