"""One writer at a time: a lock on a folder that ends with its process, however that ends.

The kernel holds the lock (`flock` on a hidden file) and frees it when the process is gone, so that
no lock ever remains; a file that a killed process left is taken over and removed. The file
tells who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from formats.errors import CheckpointError
from formats.files import writing

LOCK_FILE = ".lock"
BUSY = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def output_locked(output: Path) -> Iterator[None]:
    """Be the only one to write into an output folder; it is made, and removed if it stays empty.

    The file is in the folder, so that whoever reaches the folder, over a network or from another
    container, meets the same lock.

    Raises:
        CheckpointError: another process works there, or the file system keeps no locks.
    """
    if output.exists() and not output.is_dir():  # whoever means to write there refuses it
        yield
        return
    try:
        with _locked(output / LOCK_FILE, output):
            yield
    finally:
        with contextlib.suppress(OSError):  # it holds something
            output.rmdir()


@contextmanager
def target_locked(target: Path) -> Iterator[None]:
    """Be the only one to make a folder that appears at once, by a rename; errors as above.

    The file is beside the folder. A run that works in a folder to be replaced is met, too.
    """
    target = target.resolve()
    with _locked(target.with_name(f".{target.name}{LOCK_FILE}"), target):
        refuse_busy(target)
        yield


def made_once(kind: str, stem: str, seen: str, make: Callable[[Path], object]) -> Path:
    """A model's folder that is made when it is asked for first, and kept.

    It is kept in `PTQ_CACHE`, or else `~/.cache/ptq`, under a folder for its kind.

    Args:
        stem: What its name begins with.
        seen: All that it follows from.
        make: Makes it; its errors, and those of `target_locked`, are raised.
    """
    key = hashlib.sha256(seen.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("PTQ_CACHE") or Path.home() / ".cache" / "ptq")
    folder = cache / kind / f"{stem}-{key}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with target_locked(folder):
            if not (folder / "config.json").is_file():
                make(folder)
    return folder


def refuse_busy(output: Path) -> None:
    """Refuse an output folder that another process writes into.

    Raises:
        CheckpointError: one does.
    """
    path = output / LOCK_FILE
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError),
        path.open("r") as file,
    ):
        _take(file, output, fcntl.LOCK_SH)


@contextmanager
def _locked(path: Path, what: Path) -> Iterator[None]:
    """Hold the lock of a file, which is removed in the end, as are folders made for it alone."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        with _open(path, what) as file:
            try:
                with contextlib.suppress(PermissionError):  # another user's, who was killed
                    os.fchmod(file.fileno(), 0o666)
                file.truncate(0)
                file.write(json.dumps(_about_us()))
                file.flush()
                yield
            finally:
                path.unlink(missing_ok=True)  # while it is held: who waits sees that it is gone
    finally:
        with contextlib.suppress(OSError):  # one holds something, and so do those above it
            for folder in made:
                folder.rmdir()


def _open(path: Path, what: Path) -> IO[str]:
    """The file, locked: the one that has the name, not one that its holder has just removed."""
    while True:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = path.open("a+")
            except FileNotFoundError:  # whoever had made the folder has just removed it
                continue
        try:
            _take(file, what, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _take(file: IO[str], what: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            raise CheckpointError(
                f"{what}: another process works there. Wait until it ends, or give another output "
                f"folder{_holder(file)}"
            ) from None
        Path(file.name).unlink(missing_ok=True)  # nobody holds it
        raise CheckpointError(
            f"{what}: cannot be locked against a second run ({error.strerror}): its file system "
            "keeps no locks. Give an output folder on a local disk, and copy the result"
        ) from error


def _about_us() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
    }


def _holder(file: IO[str]) -> str:
    """Who holds a lock, if the file tells."""
    try:
        file.seek(0)
        about = json.load(file)
        return (
            f". It is process {about['pid']} on {about['host']}, since {about['since']}:\n"
            f"  {about['command']}"
        )
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written
        return ""
