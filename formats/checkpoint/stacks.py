"""The way back from `formats.checkpoint.alternating`: experts' layers put into parameters of all.

Floats, MXFP4 and biases go back into the parameters that they came from, bit for bit; a layer that
is quantized otherwise is written on its own, which is what runtimes read, as its parameter has no
form for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.alternating import LEAVES
from formats.families.feed_forward import Mixture
from formats.families.sizes import size_in

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {leaf: kind for kind, leaf in LEAVES.items()}
_LAYER = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.([^.]+)")


class ExpertStacks:
    """Layers of experts that wait until all of a parameter are there.

    Args:
        names: The family's mixture, whose experts alternate.
        config: config.json.
    """

    def __init__(self, names: Mixture, config: Mapping[str, Any]) -> None:
        self._names, self._config = names, config
        self._waiting: dict[str, dict[tuple[int, str], tuple[str, Tensor]]] = {}

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor belongs in a parameter of all experts."""
        match = _LAYER.fullmatch(name)
        if match is None or match[4] not in KINDS:
            return False
        return tensor.dtype in FLOATS if match[4] in ("weight", "bias") else _is_mxfp4(tensor)

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter, if this was the last of its layers."""
        match = _LAYER.fullmatch(name)
        assert match is not None
        experts, number, leaf, kind = match[1], int(match[2]), match[3], KINDS[match[4]]
        layer = self._names.expert
        stacked, leaves = ("down_proj", (layer.down,))
        if leaf != layer.down:
            stacked, leaves = "gate_up_proj", layer.gate_up
        stored = f"{experts}.{stacked}{kind}"
        waiting = self._waiting.setdefault(stored, {})
        waiting[number, leaf] = name, tensor
        count = size_in(self._config, self._names.count)
        if len(waiting) == count * len(leaves):
            del self._waiting[stored]
            parts = [[waiting[i, leaf][1] for leaf in leaves] for i in range(count)]
            yield stored, _stacked(parts, kind)

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What waits in vain, by the names that it was added by: other layers have other forms."""
        for waiting in self._waiting.values():
            yield from waiting.values()
        self._waiting = {}


def _is_mxfp4(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8


def _stacked(experts: list[list[Tensor]], kind: str) -> Tensor:
    """Layers' tensors [outputs, ...] as the parameter of all, outputs of each expert in turn."""
    own = torch.stack([torch.stack(layers, dim=1).flatten(0, 1) for layers in experts])
    if kind == "":
        return own.mT.contiguous()
    return own.unflatten(-1, (-1, 16)) if kind == "_blocks" else own
