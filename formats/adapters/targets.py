"""Which linear layers of a checkpoint adapters run on, by the names that PEFT has for them.

PEFT names the modules of transformers' code. Those that a family stores merged (Phi-3's qkv_proj)
are the layers that they hold here: each gets its rows of B, and A whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from formats.adapters.settings import MERGE
from formats.checkpoint.join import MergedLayers
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families import names
from formats.families.registry import predicting_layer
from formats.modeling.layers import (
    embedding_name,
    head_name,
    quantizable_of,
    routers_of,
    stored_names,
)

WEIGHTS = ("weight", "weight_packed")
LEVEL = "model."


@dataclass(frozen=True)
class Base:
    """The layers of a checkpoint that adapters run on."""

    checkpoint: Checkpoint

    @cached_property
    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Full names of layers as `Checkpoint` has them, in their order, by PEFT's name."""
        config = self.checkpoint.config
        code = {stored: name for name, stored in stored_names(config).items()}
        merged, found = MergedLayers(config), {}
        for module in self._linears:
            stored = merged.stored_name(module)
            name = code.get(f"{stored}.weight", f"{stored}.weight").removesuffix(".weight")
            found[name] = merged.parts_of(stored)
        return found

    @cached_property
    def _linears(self) -> set[str]:
        """Full names of single layers: of blocks, of no expert, with an input of their own."""
        quantizable = quantizable_of(self.checkpoint.config)
        return {m for m in self._modules if quantizable(m) and self._why_not(m) is None}

    @cached_property
    def _modules(self) -> set[str]:
        parts = (name.rpartition(".") for name in self.checkpoint.names())
        return {module for module, _, leaf in parts if leaf in WEIGHTS}

    def shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of a layer, by its name in `Checkpoint`."""
        outputs, inputs = self.checkpoint.weight_shape(module)
        return outputs, inputs

    def find(self, name: str, origin: str) -> str:
        """The name in `layers` of a module of an adapter, with or without its first level.

        Args:
            name: PEFT's.

        Raises:
            CheckpointError: adapters do not run on it, or the base has none of that name.
        """
        candidates = (name, f"{LEVEL}{name}", name.removeprefix(LEVEL))
        found = next((own for own in candidates if own in self.layers), None)
        if found is None:
            raise CheckpointError(f"{origin}: {name} {self._refusal(candidates)}")
        return found

    def _refusal(self, candidates: tuple[str, ...]) -> str:
        path = self.checkpoint.path
        kinds = (self._why_not(name) for name in candidates)
        kind = next((why for why in kinds if why is not None), None)
        if kind is None and self._modules.isdisjoint(candidates):
            return (
                f"is not among the layers of {path}, so that this adapter is of another base. Give "
                "the base that it was trained on"
            )
        return (
            f"is {kind or 'no linear layer of a block'}, on which adapters do not run; they run on "
            f"the linear layers of attention and of dense feed-forward layers. {MERGE}"
        )

    def _why_not(self, module: str) -> str | None:
        """What a module is that no adapter runs on; None of all others."""
        config = self.checkpoint.config
        if module == head_name(config):
            return "the LM head"
        if module == embedding_name(config):
            return "the embedding"
        if routers_of(config)(module):
            return "a router of a mixture of experts"
        if ".experts." in f"{module}." or names.is_shared_expert(f"{module}."):
            return "an expert of a mixture"
        if names.is_weight_only(module):
            return "a projection that is multiplied with queries and results, and has no input"
        if predicting_layer(config, module) is not None:
            return "a part of a layer that predicts further tokens"
        return None
