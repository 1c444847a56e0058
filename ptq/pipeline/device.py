"""Where blocks are run and solved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from formats.errors import RecipeError
from ptq.recipe.schema import Recipe


def device_of(recipe: Recipe) -> torch.device:
    """Where blocks are run and solved.

    Raises:
        RecipeError: the recipe asks for a GPU and there is none.
    """
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise RecipeError(
            "device: found cuda, but torch sees no GPU here; set device: cpu or auto, or install a "
            "torch with CUDA"
        )
    return torch.device("cuda" if available and recipe.device != "cpu" else "cpu")


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let products of fp32 matrices run in TF32: far faster, and finer than bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
