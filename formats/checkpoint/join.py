"""The way back from `formats.checkpoint.split`: layers that a family stores as one, put together.

Whoever writes a checkpoint adds q, k and v, gate and up, with the tensors of each; where the family
stores them merged, these wait here until all parts are there. So do experts whose family stores all
of a block in one parameter, gate and up outputs alternating (gpt-oss).

Floats, MXFP4 and biases go back into their parameters, bit for bit; a layer that
is quantized otherwise is written on its own, which is what runtimes read, as its parameter has no
form for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.split import LEAVES, ONE_FOR_ALL, SHAPE
from formats.errors import CheckpointError
from formats.families.family import Mixture
from formats.families.names import expert_of
from formats.families.registry import find_family
from formats.families.sizes import merged_rows, size_in
from formats.modeling.layers import stacks_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {leaf: kind for kind, leaf in LEAVES.items()}
_LAYER = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.([^.]+)")


class ExpertStacks:
    """Layers of experts that wait until all of a parameter are there.

    Args:
        names: The family's mixture, whose experts alternate.
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


class FoundStacks:
    """Layers of experts, of a family without a declaration, that wait likewise, in float."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._waiting: dict[str, dict[str, Tensor]] = {}

    @cached_property
    def _parameters(self) -> dict[str, str]:
        """The parameter that holds each layer's weight."""
        return {name: own for own, names in stacks_of(self._config).items() for name in names}

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor belongs in a parameter of all experts."""
        found = tensor.dtype in FLOATS and expert_of(name) is not None
        return found and name in self._parameters

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter, if this was the last of its layers."""
        parameter = self._parameters[name]
        waiting, names = self._waiting.setdefault(parameter, {}), stacks_of(self._config)[parameter]
        waiting[name] = tensor
        if len(waiting) == len(names):
            del self._waiting[parameter]
            count = len({expert_of(layer) for layer in names})
            yield parameter, torch.cat([waiting[n] for n in names]).unflatten(0, (count, -1))

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What waits in vain, as other experts are quantized."""
        for waiting in self._waiting.values():
            yield from waiting.items()
        self._waiting = {}


def _is_mxfp4(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8


def _stacked(experts: list[list[Tensor]], kind: str) -> Tensor:
    """Layers' tensors [outputs, ...] as the parameter of all, outputs of each expert in turn."""
    own = torch.stack([torch.stack(layers, dim=1).flatten(0, 1) for layers in experts])
    if kind == "":
        return own.mT.contiguous()
    return own.unflatten(-1, (-1, 16)) if kind == "_blocks" else own


class MergedLayers:
    """The layers that the checkpoints of a model hold as one.

    Args:
        config: config.json; where its family stores every layer on its own, there are none.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        family = find_family(config)
        rows = merged_rows(family, config) if family is not None and family.stored_merged else {}
        self._parts = {whole: tuple(parts) for whole, parts in rows.items()}
        self._whole = {part: whole for whole, parts in self._parts.items() for part in parts}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        mixture = family.mixture if family is not None else None
        alternating = mixture is not None and mixture.alternating
        self._stacks = ExpertStacks(mixture, config) if mixture and alternating else None
        if family is None:
            self._stacks = FoundStacks(config)

    def stored_name(self, module: str) -> str:
        """Full name of the layer on disk that a linear layer is, or is a part of."""
        parent, _, leaf = module.rpartition(".")
        return f"{parent}.{self._whole[leaf]}" if leaf in self._whole else module

    def parts_of(self, stored: str) -> tuple[str, ...]:
        """Full names of the layers that one on disk holds, in their order; of others its own."""
        parent, _, leaf = stored.rpartition(".")
        return tuple(f"{parent}.{part}" for part in self._parts.get(leaf, (leaf,)))

    def stored_names(self, modules: Iterable[str]) -> tuple[str, ...]:
        """`stored_name` of several, each once; patterns stay as they are."""
        return tuple(dict.fromkeys(map(self.stored_name, modules)))

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is to be written now that a tensor is there: itself, a merged one, or nothing yet.

        Raises:
            CheckpointError: the parts have a scale for all rows each, and these differ.
        """
        if self._stacks is not None and self._stacks.takes(name, tensor):
            yield from self._stacks.add(name, tensor)
            return
        module, _, leaf = name.rpartition(".")
        whole = self.stored_name(module)
        if whole == module:
            yield name, tensor
            return
        stored, parts = f"{whole}.{leaf}", self._parts[whole.rpartition(".")[2]]
        waiting = self._waiting.setdefault(stored, {})
        waiting[module.rpartition(".")[2]] = tensor
        if len(waiting) == len(parts):
            yield stored, _joined(stored, [waiting[part] for part in parts])
            del self._waiting[stored]

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What is left to be written in the end: layers of experts that are not all of one form.

        Raises:
            CheckpointError: a part of a merged layer is missing; it is named.
        """
        for stored, waiting in self._waiting.items():
            missing = [p for p in self._parts[stored.split(".")[-2]] if p not in waiting]
            raise CheckpointError(
                f"{stored}: no tensor was added for {', '.join(missing)}, its other parts have one"
            )
        if self._stacks is not None:
            yield from self._stacks.rest()


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    leaf = name.rpartition(".")[2]
    if leaf == SHAPE:
        return torch.stack((torch.stack([part[0] for part in parts]).sum(), parts[0][1]))
    if leaf != ONE_FOR_ALL and parts[0].shape != (1,):
        return torch.cat(parts)
    if not all(torch.equal(part, parts[0]) for part in parts):
        found = ", ".join(f"{part.item():.6g}" for part in parts)
        raise CheckpointError(
            f"{name}: its parts have the scales {found}, and the layer is stored with one. Use a "
            "scheme with weights per channel"
        )
    return parts[0]
