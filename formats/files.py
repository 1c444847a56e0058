"""Files that are whole or absent: durable writes, directories that appear at once.

A file or directory is made beside its final place under a hidden name, synced, and renamed. A
killed process leaves at most what is hidden; the next writer of the same name removes it, or, if it
died between moving an old directory away and moving the new one in, puts the old one back.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from formats.errors import CheckpointError, DiskFullError


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and flush it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that its path holds either the old content or the whole new one."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            write_bytes(temporary, data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(path.parent)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write below `path` into a CheckpointError."""
    try:
        yield
    except SafetensorError as error:
        raise _refusal(path, str(error), "os error 28" in str(error)) from error
    except OSError as error:
        raise _refusal(path, str(error), error.errno in (errno.ENOSPC, errno.EDQUOT)) from error


def _refusal(path: Path, reason: str, full: bool) -> CheckpointError:
    if not full:
        return CheckpointError(f"{path}: cannot be written ({reason}). Choose another output path")
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    return DiskFullError(
        f"{path}: the disk is full ({free / 1e6:.0f} MB free under {parent}). "
        "Free some space, or raise your quota, or choose another output path"
    )


@contextmanager
def building_directory(target: Path, *, replace: bool) -> Iterator[Path]:
    """Build a directory under a hidden name; on success it is renamed to `target`.

    Args:
        target: Final path.
        replace: Whether an existing `target` may be replaced, after the new one is complete.

    Yields:
        The hidden directory to write into.

    Raises:
        CheckpointError: `target` exists and may not be replaced, or writing failed.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target)
        if not replace and target.exists():
            raise CheckpointError(
                f"{target} exists already. Remove it, choose another output path, or allow it to "
                "be replaced with --force"
            )
        temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        temporary.mkdir()
        try:
            yield temporary
            for folder in {path.parent for path in temporary.rglob("*")} | {temporary}:
                fsync_path(folder)
            if target.exists():
                target.rename(old)
            temporary.rename(target)
            fsync_path(target.parent)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def recover(target: Path) -> None:
    """Remove what dead writers of `target` left, and put back what one had moved away."""
    for kind in ("old", "tmp"):
        for left in target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"):
            if _is_alive(left.name.rpartition("-")[2]):
                continue
            if kind == "old" and not target.exists():
                left.rename(target)
            elif left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _is_alive(pid: str) -> bool:
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
