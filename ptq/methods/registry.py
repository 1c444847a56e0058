"""Which method each specification of a recipe stands for."""

from __future__ import annotations

from collections.abc import Sequence

from ptq.methods.base import Method
from ptq.methods.rtn import RoundToNearest
from ptq.methods.smoothquant import SmoothQuant
from ptq.methods.specs import MethodSpec, RTNSpec


def build_methods(specs: Sequence[MethodSpec]) -> list[Method]:
    """The methods of a recipe, in its order."""
    return [RoundToNearest() if isinstance(spec, RTNSpec) else SmoothQuant(spec) for spec in specs]
