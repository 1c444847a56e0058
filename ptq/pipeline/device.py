"""Where blocks are run and solved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ptq.plan.devices import on_gpu
from ptq.recipe.schema import Recipe


def devices_of(recipe: Recipe) -> list[torch.device]:
    """Where blocks are run and solved; that the devices are here, the plan has checked."""
    kind, chosen = "cuda" if on_gpu(recipe) else "cpu", recipe.device
    if isinstance(chosen, str):
        return [torch.device(kind)]
    if chosen.gpus is None:
        return [torch.device(kind)] * (chosen.cpus or 1)
    return [torch.device(kind, index) for index in range(chosen.gpus)]


def device_of(recipe: Recipe) -> torch.device:
    """The first of them, or the only one."""
    return devices_of(recipe)[0]


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let products of fp32 matrices run in TF32: far faster, and finer than bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
