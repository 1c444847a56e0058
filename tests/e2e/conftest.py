"""The wheel, built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.installed import ROOT, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], ROOT)
    (built,) = out.glob("*.whl")
    return built
