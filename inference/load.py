"""From a checkpoint to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from formats.checkpoint import Checkpoint
from inference.models.llama import LlamaModel


def load_model(
    checkpoint: Checkpoint | str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaModel:
    """Load a float or quantized checkpoint.

    Args:
        checkpoint: The checkpoint or its folder.
        device: Where it runs.
        dtype: Type of activations and of float weights.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not run here.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(checkpoint)
    return LlamaModel(checkpoint, torch.device(device), dtype)
