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
from ptq.methods.shift import Shift
from ptq.methods.smooth_k import SmoothK
from ptq.methods.smoothquant import SmoothQuant
from ptq.methods.specs import MethodSpec

_CLASSES: dict[str, Callable[[Any], Method]] = {
    "shift": Shift,
    "smoothquant": SmoothQuant,
    "awq": AWQ,
    "smooth_k": SmoothK,
    "clip": Clip,
    "rtn": RoundToNearest,
    "gptq": GPTQ,
    "refine": Refine,
}


def block_specs(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Those that work on blocks; the others are views of the model (`ptq.methods.views`)."""
    return [spec for spec in specs if spec.name in _CLASSES]


def build_methods(specs: Sequence[MethodSpec]) -> list[Method]:
    """The methods of a recipe that work on blocks, in its order."""
    return [_CLASSES[spec.name](spec) for spec in block_specs(specs)]
