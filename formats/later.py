"""Modules that are imported when they are first used.

A command's file holds its arguments and what it does, a method's its specification and its
algorithm. Arguments and recipes are read, and refused, without the rest: importing torch for that
would take seconds. So what only the work needs is named in two lines, one for the reader and the
type checker, one for Python:

    if TYPE_CHECKING:
        import torch
    else:
        torch = later("torch")
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class _Later:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)


def later(name: str) -> Any:
    """The module of that full name, imported with its first use."""
    return _Later(name)
