"""Which channels of a head of q and k turn together, by a family's declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.families.family import Family
from formats.families.sizes import heads_of, rotary_channels


def turning_pairs(family: Family, config: Mapping[str, Any], layer: int) -> tuple[int, ...]:
    """A number for each channel of a head, as it is stored; the two that turn together have one.

    A factor for each number commutes with rotary embedding: only the channels of a pair must share
    it. Channels that do not turn, and all of a layer without rotation, are alone.

    Args:
        family: The model's.
        config: Its config.json.
        layer: Index of the layer.

    Raises:
        CheckpointError: a size is missing in config.json.
    """
    size, turning = heads_of(config).size, rotary_channels(family, config)
    setting = family.attention.unrotated_setting
    rotated = None if setting is None else config.get(setting)
    if rotated is not None and not rotated[layer]:
        turning = 0
    interleaved, half = family.attention.rotary_pairs == "interleaved", turning // 2
    turned = [i // 2 if interleaved else i % half for i in range(turning)]
    return (*turned, *range(half, size - half))
