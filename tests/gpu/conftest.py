"""What tests of single kernels on a GPU share."""

from __future__ import annotations

import os

import pytest
import torch

# Streams that wait for each other must not share a queue of the device, of which a process has 8
# else; it is read when the first of the tests uses the GPU. With 32, the last of 16 processes got no
# context.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")


@pytest.fixture(scope="module")
def workspace():
    """Of split sums."""
    from kernels.triton.common import Workspace

    return Workspace.on("cuda")


@pytest.fixture
def poison(monkeypatch):
    """Random numbers from a seed; results start as NaN."""
    torch.manual_seed(0)
    empty = torch.empty

    def fill(*sizes, **kind):
        made = empty(*sizes, **kind)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", fill)
