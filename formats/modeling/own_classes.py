"""Classes of models that transformers has not: ours, and those that are computed as another's."""

from __future__ import annotations

import importlib
from typing import Any

from formats.families.registry import BY_TYPE, OWN_CLASSES


def make_known(model_type: str) -> None:
    """Let transformers' AutoConfig and AutoModelForCausalLM know a class that it has not."""
    file, family = OWN_CLASSES.get(model_type), BY_TYPE.get(model_type)
    if file is not None:
        importlib.import_module(file)
    elif family is not None and family.alike is not None:
        _register(model_type, family.alike)


def _register(kind: str, alike: str) -> None:
    """Register another type's classes, as their subclasses, for a type."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if kind in CONFIG_MAPPING:
        return
    config_class, name = CONFIG_MAPPING[alike], kind.capitalize()
    model_class: Any = AutoModelForCausalLM._model_mapping[config_class]
    own = type(f"{name}Config", (config_class,), {"model_type": kind})
    AutoConfig.register(kind, own)
    made = type(f"{name}ForCausalLM", (model_class,), {"config_class": own})
    AutoModelForCausalLM.register(own, made)
