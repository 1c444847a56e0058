"""Which method each specification of a recipe stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ptq.methods.awq import AWQ
from ptq.methods.base import Method
from ptq.methods.clip import Clip
from ptq.methods.gptq import GPTQ
from ptq.methods.refine import Refine
from ptq.methods.rtn import RoundToNearest
from ptq.methods.smoothquant import SmoothQuant
from ptq.methods.specs import MethodSpec

_CLASSES: dict[str, Callable[[Any], Method]] = {
    "smoothquant": SmoothQuant,
    "awq": AWQ,
    "clip": Clip,
    "rtn": RoundToNearest,
    "gptq": GPTQ,
    "refine": Refine,
}


def build_methods(specs: Sequence[MethodSpec]) -> list[Method]:
    """The methods of a recipe, in its order."""
    return [_CLASSES[spec.name](spec) for spec in specs]
