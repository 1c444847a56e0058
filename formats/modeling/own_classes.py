"""Classes of models that are ours, for what transformers has no class of."""

from __future__ import annotations

import importlib

from formats.families.registry import OWN_CLASSES


def make_known(model_type: str) -> None:
    """Let transformers' AutoConfig and AutoModelForCausalLM know a class of ours, if it is one."""
    file = OWN_CLASSES.get(model_type)
    if file is not None:
        importlib.import_module(file)
