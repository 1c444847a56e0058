"""Tensors that are read before they are asked for are those that are read when they are."""

from __future__ import annotations

import pytest
import torch

from calibrate.workers import ReadAhead
from formats.errors import CheckpointError


def test_what_is_expected_is_read_once_and_handed_out(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which needs a GPU
    read: list[str] = []

    def reader(name: str) -> torch.Tensor:
        read.append(name)
        if name == "gone":
            raise CheckpointError("gone is missing")
        return torch.full((2,), float(len(name)))

    ahead = ReadAhead(reader)
    ahead.expect(["a", "bb", "gone"])
    assert ahead("bb").tolist() == [2, 2]
    assert ahead("ccc").tolist() == [3, 3]
    assert sorted(read) in (["a", "bb", "ccc"], ["a", "bb", "ccc", "gone"])
    with pytest.raises(CheckpointError, match="gone is missing"):
        ahead("gone")
    ahead.expect(["bb"])  # a is forgotten
    ahead("a")
    ahead("bb")
    assert (read.count("a"), read.count("bb")) == (2, 2)
