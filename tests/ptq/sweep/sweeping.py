"""Tasks for tests of sweeps, which run a stand-in for `ptq run`."""

import sys
from pathlib import Path

import pytest

from ptq.sweep import pools
from ptq.sweep.tasks import Resources, Task

STAND_IN = [sys.executable, str(Path(__file__).with_name("standing_in.py"))]


def task(folder: Path, name: str, *settings: str, **resources: int) -> Task:
    """A task that the stand-in does as its settings tell."""
    words = ["recipe", *(word for one in settings for word in ("--set", one))]
    words += ["--output", str(folder / name)]
    return Task("m", name, tuple(words), folder / name, "0" * 64, Resources(**resources))


@pytest.fixture
def stand_in(monkeypatch):
    """Have tasks of this process run the stand-in."""
    monkeypatch.setattr(pools, "PTQ", STAND_IN)
