"""Where a model lies that is given by a folder or a name."""

from __future__ import annotations

import re
from pathlib import Path

from formats.namespace import ROOT

SHIPPED = ("tiny-python",)  # models beside the recipes, in a checkout as in site-packages


def find_model(name: str | Path, folder: Path = Path()) -> Path | None:
    """The local folder that a path, from `folder` on, or else a shipped model's name stands for."""
    path = folder / Path(name).expanduser()
    if path.is_dir():
        return path
    shipped = ROOT / "recipes" / name
    return shipped if str(name) in SHIPPED and shipped.is_dir() else None


def is_hub_id(name: str | Path) -> bool:
    """Whether a name could be a model's on the Hugging Face hub: `organization/model`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", str(name), re.ASCII) is not None
