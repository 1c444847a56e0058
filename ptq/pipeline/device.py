"""Where blocks are run and solved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ptq.plan.preflight import on_gpu
from ptq.recipe.schema import Recipe


def device_of(recipe: Recipe) -> torch.device:
    """Where blocks are run and solved; that the device is here, the plan has checked."""
    return torch.device("cuda" if on_gpu(recipe) else "cpu")


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let products of fp32 matrices run in TF32: far faster, and finer than bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
