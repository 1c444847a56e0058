"""The way back from `formats.checkpoint.split`: layers that a family stores as one, put together.

Whoever writes a checkpoint adds q, k and v, gate and up, with the tensors of each; where the family
stores them merged, these wait here until all parts are there, and experts that alternate in
`formats.checkpoint.split`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.split import ONE_FOR_ALL, SHAPE, ExpertStacks
from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.families.sizes import merged_rows


class MergedLayers:
    """The layers that the checkpoints of a model hold as one.

    Args:
        config: config.json; without a declaration of its family, or where that stores every layer
            on its own, there are none.
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

    def stored_name(self, module: str) -> str:
        """Full name of the layer on disk that a linear layer is, or is a part of."""
        parent, _, leaf = module.rpartition(".")
        return f"{parent}.{self._whole[leaf]}" if leaf in self._whole else module

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
