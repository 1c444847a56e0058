"""Which published layouts are read, and what their code is read without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.families.registry import causal_class
from formats.published import baichuan, chatglm, with_images
from formats.published.layout import PublishedLayout

_LAYOUTS = (baichuan.LAYOUT, chatglm.LAYOUT, *with_images.LAYOUTS)
_BY_TYPE = {layout.model_type: layout for layout in _LAYOUTS}

PREFIXES = {"bloom": "transformer", "opt": "model"}
"""By model_type, what stands before all names but the head's in transformers' class, and is left
out in files that were saved without a head (bigscience/bloom-*, facebook/opt-66b)."""


def find_layout(config: Mapping[str, Any]) -> PublishedLayout | None:
    """The layout that a config.json names; None where it names none of them."""
    return _BY_TYPE.get(str(config.get("model_type")))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether a model is none without the code that lies beside it (auto_map).

    It needs none in a layout that is known here, nor where its code is of the class that
    transformers has for its model_type: such files were published before transformers had it, and
    are what transformers reads without trust in others' code.
    """
    code = config.get("auto_map")
    if code is None or find_layout(config) is not None:
        return False
    own = code.get("AutoModelForCausalLM") if isinstance(code, Mapping) else None
    native, name = causal_class(config), str(own).rpartition(".")[2]
    return native is None or name.lower() != native.lower()
