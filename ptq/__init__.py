"""From statistics to quantized weights; and the door for Python, whose rooms open when used.

from ptq import Checkpoint, Engine, SamplingParams, quantize
result = quantize("recipes/a8w8c8.yaml", output="output/mine")
engine = Engine.from_pretrained(result.checkpoint)
print(engine.generate(["def add(a, b):"], SamplingParams(max_tokens=32))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from formats.namespace import join_kernels, require_own_packages

if TYPE_CHECKING:
    from formats.checkpoint.read import Checkpoint
    from inference.beam_search import BeamParams, beam_search
    from inference.engine import Engine
    from inference.requests.request import SamplingParams
    from ptq.api import quantize

__all__ = ["BeamParams", "Checkpoint", "Engine", "SamplingParams", "beam_search", "quantize"]
_HOMES = {
    "BeamParams": "inference.beam_search",
    "Checkpoint": "formats.checkpoint.read",
    "Engine": "inference.engine",
    "SamplingParams": "inference.requests.request",
    "beam_search": "inference.beam_search",
    "quantize": "ptq.api",
}

join_kernels()


def __getattr__(name: str) -> Any:
    """Import what is asked for from where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ptq' has no attribute {name!r}")
    require_own_packages("inference")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
