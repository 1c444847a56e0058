"""Which published layouts are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.published import baichuan, chatglm
from formats.published.layout import PublishedLayout

_BY_TYPE = {layout.model_type: layout for layout in (baichuan.LAYOUT, chatglm.LAYOUT)}


def find_layout(config: Mapping[str, Any]) -> PublishedLayout | None:
    """The layout that a config.json names; None where it names none of them."""
    return _BY_TYPE.get(str(config.get("model_type")))
