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
    rest = dict(values)
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
