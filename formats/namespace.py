"""Our packages beside those of others that bear the same names.

`kernels` is also a package of Hugging Face. transformers probes an installed one when it is
imported, so a regular package of ours under that name would break it. Ours therefore carries no
`__init__.py`: alone it is a namespace package, and a foreign regular package, wherever it stands on
the path, wins the name. What that does not hold is then looked for in our folder, so that
`from kernels.ops import ...` works beside it. Every package of ours that stands on `kernels` calls
`join_kernels`, so that any of them may be imported first.

`inference` is also a package of Roboflow. The first on the path wins; commands refuse to go on
where that is not ours.

Modules that are imported inside `with later():` are loaded with their first use. A command's file
holds its arguments and what it does, a method's its specification and its algorithm. Arguments and
recipes are read, and refused, without the rest: importing torch for that would take seconds.

The version is that of all packages, which are one distribution.
"""

from __future__ import annotations

import builtins
import gc
import importlib.metadata
import importlib.util
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from formats.errors import EngineError


class _Deferring(threading.local):
    on = False  # whether this thread is inside `later`


_deferring = _Deferring()


class _Later:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if _deferring.on:  # an import statement asks for what it names
            return _Later(f"{self._name}.{attribute}")
        if self._module is None:
            self._module = load_module(self._name)
        return getattr(self._module, attribute)


def load_module(name: str) -> ModuleType:
    """Import a module with the garbage collector at rest.

    Classes and functions by the hundred thousand come to stay when torch and transformers are
    imported. To look through them again and again would take a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if enabled:
            gc.enable()


@contextmanager
def later() -> Iterator[None]:
    """Load modules that are imported inside with their first use, as PEP 810 has it.

    What is imported must be modules: `import torch`, `from kernels import numerics`. A class or
    function is not loaded by being called.
    """
    now = builtins.__import__

    def deferred(name: str, *arguments: Any, **named: Any) -> Any:
        if not _deferring.on:  # another thread's
            return now(name, *arguments, **named)
        fromlist = named.get("fromlist") or (arguments[2] if len(arguments) > 2 else ())
        return _Later(name if fromlist else name.partition(".")[0])

    builtins.__import__ = deferred
    _deferring.on = True
    try:
        yield
    finally:
        _deferring.on = False
        builtins.__import__ = now


ROOT = Path(__file__).resolve().parent.parent  # of all packages: a checkout, or site-packages


class _KernelsFinder:
    """Finds `kernels.<module>` in our folder where the package of that name has no such module."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is; None for all but modules right below `kernels`."""
        if name.rpartition(".")[0] != "kernels":
            return None
        return PathFinder.find_spec(name, [str(ROOT / "kernels")], target)


def join_kernels() -> None:
    """Make `kernels.<module>` of this project importable, whoever owns the name `kernels`."""
    if _KernelsFinder not in sys.meta_path:
        sys.meta_path.append(_KernelsFinder)


def require_own_packages(*packages: str) -> None:
    """Check where Python would import packages from, without importing them.

    Raises:
        EngineError: another project's package of that name would be imported, or none.
    """
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise EngineError(f"the package {name!r} is missing from {ROOT}; install ptq again")
        found = Path(spec.origin).resolve().parent
        if found != ROOT / name:
            raise EngineError(
                f"`import {name}` would load {found}, another project's package of that name, and "
                f"not {ROOT / name}. Remove it (`pip uninstall {name}`), or install ptq in a "
                "virtual environment of its own"
            )


def version() -> str:
    """Version of the installed distribution `ptq`, or of the checkout that this file is in."""
    try:
        return importlib.metadata.version("ptq")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project["version"]
