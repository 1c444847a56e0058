"""Whose code runs a model: the interpreters of declared families, or transformers' own."""

from __future__ import annotations

import logging
from typing import Any

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.registry import find_family
from formats.modeling.config import transformers_config
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.layers import LayerFactory
from inference.transformers_code.model import CodeModel, CodeShape

log = logging.getLogger("ptq.inference")

Shape = ModelConfig | CodeShape


def check_config(checkpoint: Checkpoint) -> None:
    """Refuse a config.json that describes no model, before anything else reads it.

    Raises:
        CheckpointError: what it says is missing, wrong or not run here.
    """
    if find_family(checkpoint.config) is None:
        transformers_config(checkpoint.config)
    else:
        ModelConfig.from_checkpoint(checkpoint)


def read_shape(
    checkpoint: Checkpoint, factory: LayerFactory[Any, Any], *, transformers_code: bool = False
) -> Shape:
    """The shape of a checkpoint's model, which says whose code will run it.

    A declared family that the device's kernels refuse runs by transformers' code, which is logged.

    Args:
        factory: The backend that it will run on.
        transformers_code: Run a declared family by transformers' code, too.

    Raises:
        CheckpointError: it is a model that neither runs.
    """
    kind = checkpoint.config.get("model_type")
    if find_family(checkpoint.config) is None:
        shape = CodeShape.from_checkpoint(checkpoint)
        log.info("%s: no family declares it; transformers' own code runs it", kind)
        return shape
    if transformers_code:
        return CodeShape.from_checkpoint(checkpoint)
    declared = ModelConfig.from_checkpoint(checkpoint)
    try:
        factory.check(declared)
    except CheckpointError as refused:
        shape = CodeShape.from_checkpoint(checkpoint)
        log.warning("%s; transformers' own code runs it there, more slowly", refused)
        return shape
    return declared


def load_model(
    checkpoint: Checkpoint, shape: Shape, factory: LayerFactory[Any, Any], longest: int
) -> Decoder[Any, Any] | CodeModel:
    """Load a model for requests of up to so many tokens.

    Raises:
        CheckpointError: tensors are missing or do not fit.
    """
    if isinstance(shape, CodeShape):
        return CodeModel(checkpoint, shape, factory, longest)
    return Decoder(checkpoint, factory, longest)
