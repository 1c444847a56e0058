"""What the methods of a run found by running samples, kept so that `ptq solve` needs none.

`found.safetensors` in a run's output holds what each method has kept (`Method.found`): factors of
smoothing groups, ranges. A tensor's name is `<block>/<method>/<name>`; the header holds the part of
the recipe that decided on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from formats.errors import CheckpointError
from formats.files import replace_file
from ptq.methods.registry import block_methods
from ptq.output import FOUND_FILE
from ptq.recipe.schema import Recipe

SETTINGS = ("methods", "scheme", "layers", "observers")  # keys of a recipe
HEADER = "ptq_found"


@dataclass(frozen=True)
class Found:
    """What a run's methods found.

    Attributes:
        settings: What decided on it: those of the recipe's keys that `SETTINGS` names.
        tensors: By `<block>/<method>/<name>`.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def under(
        cls, recipe: Recipe, blocks: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
    ) -> Found:
        """Of a run of a recipe: by block, method and name."""
        settings = recipe.model_dump(mode="json", include=set(SETTINGS))
        return cls(
            settings,
            {
                f"{block}/{method}/{name}": tensor.cpu().contiguous()
                for block, methods in blocks.items()
                for method, found in methods.items()
                for name, tensor in found.items()
            },
        )

    @classmethod
    def load(cls, output: Path) -> Found:
        """Read what a finished run left in its output folder.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        path = output / FOUND_FILE
        try:
            with safe_open(path, framework="pt") as file:
                settings = json.loads((file.metadata() or {})[HEADER])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: not a readable record of what a run found ({error}). Run the recipe "
                "again to write it"
            ) from error
        return cls(settings, tensors)

    def save(self, output: Path) -> None:
        """Write the file; it is replaced at once or not at all."""
        header = {HEADER: json.dumps(self.settings)}
        replace_file(output / FOUND_FILE, save(dict(self.tensors), metadata=header))

    def of(self, block: str, method: str) -> dict[str, Tensor]:
        """What a method found in a block, such as the factors of each group, by its source."""
        start = f"{block}/{method}/"
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    def options(self, method: str) -> dict[str, Any] | None:
        """Options with which the run searched; None of a method that it did not have."""
        return next((m for m in self.settings["methods"] if m["name"] == method), None)

    def same_methods(self, recipe: Recipe, count: int) -> bool:
        """Whether the first methods of a recipe are those of the run, options and all."""
        mine = recipe.model_dump(mode="json", include={"methods"})["methods"][:count]
        return self.settings["methods"][:count] == mine

    def differing(self, recipe: Recipe) -> list[str]:
        """Keys beside the methods in which a recipe is not the run's."""
        mine = recipe.model_dump(mode="json", include=set(SETTINGS))
        return [key for key in SETTINGS[1:] if mine[key] != self.settings[key]]

    def recalled(self, recipe: Recipe) -> list[str]:
        """Methods of a recipe that take what the run found, in the recipe's order.

        Those up to one must be the run's own; ranges hold for the run's scheme and observers only.
        """
        names, order = [], [spec.name for spec in recipe.methods]
        for spec, method in block_methods(recipe.methods):
            holds = method.keeps == "factors" or (
                method.keeps == "ranges" and not self.differing(recipe)
            )
            if holds and self.same_methods(recipe, order.index(spec.name) + 1):
                names.append(spec.name)
        return names
