"""Where the folder of a model is that a user names: a folder, a name on the hub, a .gguf file."""

from __future__ import annotations

import os
from pathlib import Path

from formats import hub
from formats.files import made_once
from formats.namespace import later

with later():
    from formats.gguf import unpack

LAYOUT = 3  # of the folders that are made; a change of it makes them again


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a .gguf file."""
    return Path(path).suffix.lower() == ".gguf" and os.path.isfile(os.path.expanduser(path))


def locate_source(name: str | Path) -> Path:
    """What is converted: a .gguf file as it is, else as `locate_model`."""
    return Path(os.path.expanduser(name)) if is_gguf(name) else locate_model(name)


def locate_model(
    name: str | Path,
    revision: str | None = None,
    *,
    floats: bool = False,
    progress: bool = True,
) -> Path:
    """The folder of a model; that of a .gguf file is made when it is asked for first, and kept
    (`formats.files.made_once`).

    Args:
        name: A folder, a .gguf file, or a model's name (`formats.hub`).
        revision: Branch, tag or commit of a model on the hub.
        floats: Whether integers of a .gguf file become floats, to be quantized anew.
        progress: Whether to show a bar while its folder is made.

    Raises:
        CheckpointError: there is no such model, it cannot be had, or it is of a kind that is not
            read here.
    """
    if not is_gguf(name):
        return hub.locate_folder(name, revision)
    path = Path(os.path.expanduser(name)).resolve()
    state = path.stat()
    seen = f"{path} {state.st_size} {state.st_mtime_ns} {floats} {LAYOUT}"

    def make(folder: Path) -> None:
        unpack.unpack(path, folder, floats=floats, progress=progress)

    return made_once("gguf", path.stem, seen, make)
