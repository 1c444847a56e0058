"""Which published layouts are read, and what their code is read without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.families.registry import causal_class, is_ours
from formats.published import baichuan, chatglm, with_images
from formats.published.layout import PublishedLayout

_LAYOUTS = (baichuan.LAYOUT, chatglm.LAYOUT, *with_images.LAYOUTS)
_BY_TYPE = {layout.model_type: layout for layout in _LAYOUTS}

TURNED = {"gpt2": ("c_attn", "c_proj", "c_fc")}
"""By model_type, last parts of the names of linear layers whose float weights lie as [in, out]:
transformers' class holds them in its Conv1D, which multiplies by them from the right. Here they are
linear layers as all others; what is quantized is stored as [out, in]."""


def is_turned(config: Mapping[str, Any], module: str) -> bool:
    """Whether the float weight of a module, by its full or own name, is stored as [in, out]."""
    turned = TURNED.get(str(config.get("model_type")), ())
    return module.rpartition(".")[2] in turned


def find_layout(config: Mapping[str, Any]) -> PublishedLayout | None:
    """The layout that a config.json names; None where it names none of them."""
    return _BY_TYPE.get(str(config.get("model_type")))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether a model is none without the code that is beside it (auto_map).

    It needs none in a layout that is known here, nor of a class that is, nor where its code is that
    transformers has for its model_type: such files were published before transformers had it, and
    are what transformers reads without trust in others' code.
    """
    code = config.get("auto_map")
    if code is None or find_layout(config) is not None or is_ours(config):
        return False
    own = code.get("AutoModelForCausalLM") if isinstance(code, Mapping) else None
    native, name = causal_class(config), str(own).rpartition(".")[2]
    return native is None or name.lower() != native.lower()
