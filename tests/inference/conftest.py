"""What tests of the engine's commands share."""

from __future__ import annotations

from functools import cached_property

import pytest

from inference.bench import requests
from inference.bench.load import Load, Run, run_once
from inference.bench.requests import EngineSource
from inference.engine import Engine


class EngineHere:
    """`EngineProcess` without a process, which takes seconds to import what this one has."""

    def __init__(self, source: EngineSource) -> None:
        assert source.fake is None, "fakes are made by the process"
        self._source = source

    @cached_property
    def _engine(self) -> Engine:
        return self._source.load()

    def __enter__(self) -> EngineHere:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def run(self, load: Load) -> Run:
        return run_once(self._engine, load)


@pytest.fixture
def engines_here(monkeypatch) -> None:
    """A bench's engines run in this process; `test_the_command_compares_two_models` starts some."""
    monkeypatch.setattr(requests, "EngineProcess", EngineHere)
