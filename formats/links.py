"""Which files a model's folder has: one rule for names and links, kept by every reader.

A link is followed within the folder, or from a snapshot in a Hugging Face cache to the blobs of the
same model, and nowhere else:

    models--OWNER--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH

The folder itself may lie behind links: `/data -> /mnt/data` changes nothing for `/data/model`.
"""

from __future__ import annotations

import os
from pathlib import Path

from formats.errors import CheckpointError


def find_file(folder: Path, name: str, origin: str | None = None) -> Path | None:
    """A file of a model's folder; None where nothing has that name.

    Whatever is read of a folder is opened by the path that this gives.

    Args:
        folder: The folder.
        name: Path of the file in it.
        origin: The file that names this one, for messages, where one does.

    Raises:
        CheckpointError: the path leads out of the folder, in a circle or to nothing, or what is
            there is no file that this user may read.
    """
    path = folder / name
    where = f"{folder}: {name!r}" if origin is None else f"{folder}: {name!r}, named by {origin},"
    try:
        real = Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.is_symlink():
            return None
        found = f"is a link to {os.readlink(path)!r}, where nothing is"
        raise _unusable(where, found) from error
    except (OSError, ValueError) as error:  # a circle of links; a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise _unusable(where, f"cannot be opened ({reason})") from error
    if Path(name).is_absolute() or not any(map(real.is_relative_to, _allowed(folder.resolve()))):
        raise CheckpointError(
            f"{where} lies outside of this folder: at {real}. Only the folder's own files are "
            "read, and those that a snapshot in a Hugging Face cache links to. Copy the file into "
            "the folder if you trust it"
        )
    if not real.is_file():
        found = "is a folder" if real.is_dir() else "is a pipe or a device"
        raise _unusable(where, f"{found}; needed is a file")
    if not os.access(real, os.R_OK):
        raise CheckpointError(
            f"{where} may not be read by this user. Let its owner run `chmod -R a+rX {folder}`"
        )
    return path


def _allowed(root: Path) -> list[Path]:
    """Where the files of a folder, given without links, may lie."""
    snapshots = (p for p in root.parents if p.name == "snapshots")
    models = (p.parent for p in snapshots if p.parent.name.startswith("models--"))
    return [root, *(model / "blobs" for model in models)]


def _unusable(where: str, found: str) -> CheckpointError:
    return CheckpointError(f"{where} {found}. Copy or download the model again")
