"""config.json as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from formats.errors import CheckpointError
from formats.modeling.own_classes import make_known


def transformers_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A config.json as transformers reads it.

    Raises:
        CheckpointError: transformers knows no such model, or refuses a value.
    """
    rest = plain_values(values)
    kind = str(rest.pop("model_type", None))
    make_known(kind)
    try:
        return AutoConfig.for_model(kind, **rest)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        found = "refuses it" if kind in CONFIG_MAPPING else "takes it for none"
        raise CheckpointError(
            f"config.json: transformers {found} ({reason}). Correct it, or copy that of the "
            "original model"
        ) from error


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json without its code's names, infinities as numbers."""
    return {name: _plain(value) for name, value in values.items() if name != "auto_map"}


def _plain(value: Any) -> Any:
    """A value with the infinities that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return {name: _plain(part) for name, part in value.items()}
