"""Makes sure that the packages beside this one are this project's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from formats.errors import EngineError

ROOT = Path(__file__).resolve().parent.parent


def require_own(*packages: str) -> None:
    """Check where Python would import packages from, without importing them.

    Others publish an `inference` too (Roboflow), and the first on the path wins.

    Raises:
        EngineError: another package of that name would be imported, or none.
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
