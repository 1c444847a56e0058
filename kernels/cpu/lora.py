"""Low-rank adapters of linear layers on a CPU (LoRA; Hu et al. 2021, arXiv 2106.09685).

A row of a layer's result gets y += B (A x) of the adapter that its token has. Several adapters are
held side by side, by slot; layers that were merged (q, k and v) have a part each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from kernels.cpu import native
from kernels.cpu.structures import FORMATS, STORAGE_NAMES, Lora, LoraPart
from kernels.low_rank import LowRank


class LoraTable:
    """The adapters of linear layers, which compiled kernels read where they are.

    Args:
        linears: How many layers there are.
    """

    def __init__(self, linears: int) -> None:
        self._linears = linears
        self._held: list[Mapping[int, Sequence[LowRank]]] = []  # by slot, then layer
        self._parts: list[list[ctypes.Array[LoraPart]]] = []  # what the table points to
        self._table = (Lora * 0)()

    @property
    def address(self) -> int:
        """Of the compiled kernels' table, [slots, layers]; another one once a slot was added."""
        return ctypes.addressof(self._table)

    def put(self, slot: int, layers: Mapping[int, Sequence[LowRank]]) -> None:
        """Hold an adapter in a slot, in the place of what was there.

        Args:
            layers: What it adds, by the layer's number; nothing to others.
        """
        while len(self._held) <= slot:
            self._held.append({})
            self._parts.append([])
        if len(self._table) < len(self._held) * self._linears:
            wider = (Lora * (len(self._held) * self._linears))()
            ctypes.memmove(wider, self._table, ctypes.sizeof(self._table))
            self._table = wider
        self._held[slot], self._parts[slot] = layers, []
        for linear in range(self._linears):
            own = layers.get(linear, ())
            parts = (LoraPart * len(own))(*map(_part, own))
            self._parts[slot].append(parts)
            inputs = own[0].inputs if own else 0
            row = Lora(ctypes.addressof(parts), len(own), inputs)
            self._table[slot * self._linears + linear] = row

    def of(self, slot: int, linear: int) -> Sequence[LowRank]:
        """What the adapter in a slot adds to a layer."""
        return self._held[slot].get(linear, ())

    def add(self, x: Tensor, y: Tensor, slots: Tensor, linear: int) -> None:
        """`kernels.ops.add_lora`, by the compiled kernels: x fp32 [T, K], y fp32 [T, N]."""
        own = self.address + linear * ctypes.sizeof(Lora)
        native.call("lora", own, self._linears, slots, x, y, *x.shape, y.shape[1])


def _part(own: LowRank) -> LoraPart:
    kind = FORMATS[STORAGE_NAMES[own.a.dtype]]
    return LoraPart(own.a.data_ptr(), own.b.data_ptr(), own.rank, own.first, own.outputs, kind)
