"""Rotary embeddings inside transformers' code whose frequencies depend on how long a sequence is.

transformers changes such frequencies when the longest sequence of a batch grows past a length: in a
batch of several requests that would turn the keys of one by the length of another. Here they are
chosen once, when the model is loaded, as `inference.models.rotary` documents: LongRoPE's short ones
where no request may be longer than the length that the model was first trained on, else the long
ones; those of dynamic NTK scaling are the first ones, since no request is longer than the model's
positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.errors import CheckpointError

CHANGING = ("longrope", "dynamic")


def fix_frequencies(model: nn.Module, longest: int) -> None:
    """Choose the frequencies of every rotary embedding for requests of up to so many tokens.

    Raises:
        CheckpointError: the code keeps frequencies in a way that is not known here.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _fix(module, kind, longest, layer_type)
            module.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            _fix(module, kinds, longest, None)
            module.rope_type = "default"


def _fix(module: Any, kind: str, longest: int, layer_type: str | None) -> None:
    if not any(name in str(kind) for name in CHANGING):
        return
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequency = getattr(module, f"{prefix}inv_freq", None)
    if frequency is None:
        raise CheckpointError(f"{type(module).__name__}: rope_type {kind!r} is not run here")
    if kind != "longrope":
        return
    parameters = module.config.rope_parameters
    own = parameters if layer_type is None else parameters[layer_type]
    limit = own["original_max_position_embeddings"]
    if longest > limit:
        options = {} if layer_type is None else {"layer_type": layer_type}
        longer, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, torch.device("cpu"), seq_len=limit + 1, **options
        )
        frequency.copy_(longer)
