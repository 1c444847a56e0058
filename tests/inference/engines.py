"""Engines of tiny models, prompts for them, and requests that run to their end."""

from collections.abc import Mapping
from pathlib import Path

import torch

from inference.beam_search import BeamSearch
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import RequestOutput


def engine_of(folder, adapters: Mapping[str, Path] | None = None, **config) -> Engine:
    """An engine on the CPU, with fields of `EngineConfig` by their names."""
    return Engine.from_pretrained(folder, config=EngineConfig(**config), adapters=adapters)


def drafting(folder, method: str | None, path=None, depth: int | None = 3, **config) -> Engine:
    """One that drafts by a method, if any is named, with a network of a path."""
    own = method and SpeculateConfig(method=method, path=path and str(path), depth=depth)
    return engine_of(folder, speculate=own, **config)


def ids(count: int, seed: int = 0) -> list[int]:
    """Random tokens of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 384, (count,), generator=generator).tolist()


def tokens_of(output: RequestOutput) -> list[int]:
    """The tokens of a prompt and of its answer."""
    return [*output.prompt_token_ids, *output.token_ids]


def finish(engine: Engine, *searches: BeamSearch) -> dict[str, RequestOutput]:
    """Outputs of all requests by their names, searches beside; no step loses a block."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        result = engine.advance()
        ended |= {output.request_id: output for output in result.finished}
        for search in searches:
            search.take(result)
        engine.check_integrity()
    return ended
