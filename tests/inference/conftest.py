"""What tests of the engine's commands share."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from inference.bench import requests
from inference.bench.load import Load, Run, run_once
from inference.bench.requests import EngineSource
from inference.engine import Engine
from inference.structured.compiler import GrammarCompiler


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


@pytest.fixture(scope="session", autouse=True)
def one_compiler() -> Iterator[None]:
    """Engines of equal tokenizers share what compiles constraints, whose process starts slowly."""
    made: dict[tuple[str, int, frozenset[int]], GrammarCompiler] = {}

    def shared(tokenizer: Any, vocabulary: int, ends: Set[int]) -> GrammarCompiler:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        key = backend.to_str() if backend else str(id(tokenizer)), vocabulary, frozenset(ends)
        if key not in made:
            made[key] = GrammarCompiler(tokenizer, vocabulary, ends)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference.engine.GrammarCompiler", shared)
        yield


@pytest.fixture(scope="module")
def model(tiny_llama, make_quantized) -> Path:
    return make_quantized(tiny_llama)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_pretrained(model)
