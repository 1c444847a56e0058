"""Threads for tests of what must not depend on them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def with_threads():
    """Sets torch's number of threads; the former one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
