"""What tests of single kernels on a GPU share."""

from __future__ import annotations

import pytest
import torch


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
