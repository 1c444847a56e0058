"""Which families there are: every module of `formats.families.declared` declares one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.families import declared
from formats.families.family import Attention, Family


def _collect() -> tuple[Family, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(declared.__path__))
    found = (importlib.import_module(f"{declared.__name__}.{name}") for name in names)
    return tuple(module.FAMILY for module in found)


FAMILIES = _collect()
BY_TYPE: Mapping[str, Family] = {kind: family for family in FAMILIES for kind in family.model_types}
MODEL_TYPES = tuple(BY_TYPE)


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family that config.json names; None where there is no declaration of it."""
    return BY_TYPE.get(str(config.get("model_type")))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that config.json names.

    Raises:
        CheckpointError: there is no declaration of it.
    """
    family = find_family(config)
    if family is None:
        raise CheckpointError(
            f"config.json: model_type {config.get('model_type')!r} is not supported; supported are "
            f"{', '.join(MODEL_TYPES)}"
        )
    return family


def block_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of a model's decoder blocks, in their order."""
    return tuple(f"model.layers.{i}" for i in range(int(config.get("num_hidden_layers") or 0)))


def attention_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of the attention modules of a model's blocks, in their order."""
    family = find_family(config)
    attention = Attention() if family is None else family.attention
    return tuple(f"{block}.{attention.module}" for block in block_names(config))
