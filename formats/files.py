"""Files that others see whole or not at all, and folders that have one writer at a time.

A file or directory is made beside its final place under a hidden name, synced, and renamed. A
killed process leaves at most what is hidden; the next writer of the same name removes it, or, if it
died between moving an old directory away and moving the new one in, puts the old one back.

Every reader of a model's folder keeps one rule for names and links. A link is followed within the
folder, or from a snapshot in a Hugging Face cache to the blobs of the same model, and nowhere else:

    models--OWNER--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH

The path to the folder may have links: `/data -> /mnt/data` changes nothing for `/data/model`.

A writer locks a folder. The kernel holds the lock (`flock` on a hidden file) and frees it when the
process is gone, so that no lock ever remains; a file that a killed process left is taken over and
removed. The file tells who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from formats.errors import CheckpointError, DiskFullError


def find_file(folder: Path, name: str, origin: str | None = None) -> Path | None:
    """A file of a model's folder; None where nothing has that name.

    Whatever is read of a folder is opened by the path that this gives.

    Args:
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
            f"{where} is outside of this folder: at {real}. Only the folder's own files are "
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
    """Write a file so that its path holds either the old content or the whole new one.

    What is written to a pipe or to a device such as /dev/null goes there, and replaces neither.
    """
    with writing(path):
        if path.is_fifo() or path.is_char_device():
            path.write_bytes(data)
            return
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


LOCK_FILE = ".lock"
SET_CACHE = "Set PTQ_CACHE to a folder for what is made once"
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

    It is kept in `PTQ_CACHE`, or else in the user's own cache, under a folder for its kind.

    Args:
        stem: What its name begins with.
        seen: All that it follows from.
        make: Makes it; its errors, and those of `target_locked`, are raised.

    Raises:
        CheckpointError: nothing can be written there.
    """
    key = hashlib.sha256(seen.encode()).hexdigest()[:16]
    folder = _cache_folder() / kind / f"{stem}-{key}"
    if not (folder / "config.json").is_file():
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(folder.parent, os.W_OK):
            raise CheckpointError(f"{folder.parent}: this user cannot write there. {SET_CACHE}")
        with target_locked(folder):
            if not (folder / "config.json").is_file():
                make(folder)
    return folder


def _cache_folder() -> Path:
    """As of `kernels.cpu.native`, which this package does not import."""
    if own := os.environ.get("PTQ_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptq"
    except RuntimeError as error:
        raise CheckpointError(f"this user has no home folder. {SET_CACHE}") from error


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
