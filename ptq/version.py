"""The version of this project."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path


def version() -> str:
    """Version of the installed package, or of the checkout that this file is in."""
    try:
        return importlib.metadata.version("ptq")
    except importlib.metadata.PackageNotFoundError:
        file = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
