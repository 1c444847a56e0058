"""The layer that gives logits, where a recipe quantizes it: which tensors that takes.

A head may be the embedding (tied). Where it is quantized then, its integers are both: a checkpoint
holds them once, as the head's, and has no embedding of its own. The method `untie` gives the head a
tensor of its own first, and leaves the embedding in float.
"""

from __future__ import annotations

from collections.abc import Collection

from formats.modeling.layers import head_name, tied_names
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.spec import Stage

HEAD_STAGES = (Stage.ROTATE, Stage.ROUND)
"""Stages of the methods that a head is made by: it is no part of a block that others work on."""
PIECE = 1 << 26
"""Weights of a head that are solved at once: rows of it, so that memory ignores the vocabulary."""


def piece_rows(shape: tuple[int, int]) -> int:
    """Rows of a head [out, in] that are solved at once."""
    return min(shape[0], max(1, PIECE // shape[1] // 256) * 256)


def head_weight(model: FloatModel) -> str:
    """Name of the tensor that holds the head's weight: the embedding's where it is tied to it."""
    own = f"{head_name(model.config)}.weight"
    return own if own in model else tied_names(model.config).get(own, own)


def shared_embedding(model: FloatModel, quantized: Collection[str]) -> str | None:
    """Name of the embedding's tensor, where a head that is quantized is tied to it; else None.

    Args:
        model: That is quantized.
        quantized: Full names of the layers that are.
    """
    head = head_name(model.config)
    if head not in quantized:
        return None
    holds = head_weight(model)
    return None if holds == f"{head}.weight" else holds
