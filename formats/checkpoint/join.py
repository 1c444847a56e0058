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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.split import LEAVES, ONE_FOR_ALL, SHAPE
from formats.errors import CheckpointError
from formats.families.block_layers import expert_of
from formats.families.family import Mixture
from formats.families.registry import find_family
from formats.families.sizes import merged_rows, size_in
from formats.modeling.layers import stacks_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = {leaf: kind for kind, leaf in LEAVES.items()}
_LAYER = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)\.([^.]+)")


Place = tuple[str, str, Sequence[str]]  # a parameter, its kind, and the tensors that it is made of


class ExpertStacks:
    """Tensors of experts that wait until all of a parameter are there.

    Args:
        mixture: The family's, whose experts alternate; None where nothing is declared: floats,
            one below the other.
    """

    def __init__(self, config: Mapping[str, Any], mixture: Mixture | None) -> None:
        self._config, self._mixture = config, mixture
        self._waiting: dict[str, dict[str, Tensor]] = {}

    @cached_property
    def _parameters(self) -> dict[str, str]:
        """The parameter that holds each layer's weight, where nothing is declared."""
        return {name: own for own, names in stacks_of(self._config).items() for name in names}

    def place(self, name: str, tensor: Tensor) -> Place | None:
        """Where a tensor belongs; None where that is in no parameter of all experts."""
        floats, match = tensor.dtype in FLOATS, _LAYER.fullmatch(name)
        if self._mixture is None:
            own = self._parameters.get(name) if floats and expert_of(name) is not None else None
            return None if own is None else (own, "", stacks_of(self._config)[own])
        if match is None or match[4] not in KINDS:
            return None
        experts, _, leaf, kind = match.groups()
        if not (floats if kind in ("weight", "bias") else tensor.dtype == torch.uint8):
            return None
        stacked, leaves = "gate_up_proj", self._mixture.expert.gate_up
        if leaf == self._mixture.expert.down:
            stacked, leaves = "down_proj", (leaf,)
        numbers = range(size_in(self._config, self._mixture.count))
        names = [f"{experts}.{number}.{own}.{kind}" for number in numbers for own in leaves]
        return f"{experts}.{stacked}{KINDS[kind]}", KINDS[kind], names

    def add(self, place: Place, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter, if this was the last of its tensors."""
        parameter, kind, names = place
        waiting = self._waiting.setdefault(parameter, {})
        waiting[name] = tensor
        if len(waiting) == len(names):
            del self._waiting[parameter]
            parts, count = [waiting[own] for own in names], len(set(map(expert_of, names)))
            if self._mixture is None:
                yield parameter, torch.cat(parts).unflatten(0, (count, -1))
            else:
                yield parameter, _alternating(parts, count, kind)

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What waits in vain, by the names that it was added by: other layers have other forms."""
        for waiting in self._waiting.values():
            yield from waiting.items()
        self._waiting = {}


def _alternating(parts: list[Tensor], count: int, kind: str) -> Tensor:
    """Layers' tensors [outputs, ...] as the parameter of all, outputs of each expert in turn."""
    size = len(parts) // count
    experts = (parts[i : i + size] for i in range(0, len(parts), size))
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
        stacked = family is None or (mixture is not None and mixture.alternating)
        self._stacks = ExpertStacks(config, mixture) if stacked else None

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
        place = None if self._stacks is None else self._stacks.place(name, tensor)
        if self._stacks is not None and place is not None:
            yield from self._stacks.add(place, name, tensor)
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
