"""Modules that algorithms compute with, each imported when it is first used.

A method's file holds its specification and its algorithm. A recipe is read, and refused, by the
specifications alone: importing torch for that would take seconds.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Later:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as functional
    from torch import nn as nn

    import kernels.numerics as numerics
    import kernels.two_level as two_level
    from calibrate import observers as observers
    from formats.checkpoint import weights as storage
    from ptq.methods.common import cache as cache
    from ptq.methods.common import descent as descent
    from ptq.methods.common import hadamard as hadamard
    from ptq.methods.common import moments as moments
    from ptq.methods.common import rounding as rounding
else:
    torch = _Later("torch")
    nn = _Later("torch.nn")
    functional = _Later("torch.nn.functional")
    numerics = _Later("kernels.numerics")
    two_level = _Later("kernels.two_level")
    observers = _Later("calibrate.observers")
    storage = _Later("formats.checkpoint.weights")
    cache = _Later("ptq.methods.common.cache")
    descent = _Later("ptq.methods.common.descent")
    hadamard = _Later("ptq.methods.common.hadamard")
    moments = _Later("ptq.methods.common.moments")
    rounding = _Later("ptq.methods.common.rounding")
