"""Writers that were killed leave nothing behind once the same path is written again."""

import os
import subprocess
import sys

import pytest

from formats.errors import CheckpointError
from formats.files import building_directory, made_once, replace_file


class Stop(BaseException):
    """Ends a writer before its directory is whole."""


@pytest.fixture(scope="module")
def dead() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("name", ["table.json", "table[1].json"])
def test_a_file_of_a_dead_writer_goes_with_the_next_one(tmp_path, dead, name):
    (tmp_path / f".{name}.tmp-{dead}").write_text("hal")
    (tmp_path / f".{name}.tmp-{os.getppid()}").write_text("of one that writes now")
    (tmp_path / f".other{name}.tmp-{dead}").write_text("of another file")
    replace_file(tmp_path / name, b"whole")
    assert (tmp_path / name).read_bytes() == b"whole"
    assert {path.name for path in tmp_path.iterdir()} == {
        name,
        f".{name}.tmp-{os.getppid()}",
        f".other{name}.tmp-{dead}",
    }


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
    assert path.read_bytes() == b"old"


def test_a_pipe_or_a_device_is_written_to_and_stays_what_it_is(tmp_path):
    """As root, `--output /dev/null` would have made a file of what all programs write to."""
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"whole")
    assert os.read(reader, 99) == b"whole"
    os.close(reader)
    link.symlink_to(os.devnull)
    replace_file(link, b"whole")
    assert pipe.is_fifo()
    assert link.is_char_device()


@pytest.mark.parametrize("moved_in", [False, True])
def test_a_directory_of_a_dead_writer_is_put_back_or_removed(tmp_path, dead, moved_in):
    """It was killed after it had moved the old directory away, or after the new one was there."""
    target, old = tmp_path / "checkpoint", tmp_path / f".checkpoint.old-{dead}"
    for folder in (old, tmp_path / f".checkpoint.tmp-{dead}", *[target] * moved_in):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    with pytest.raises(Stop), building_directory(target, replace=True):
        raise Stop
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (target / "config.json").read_text() == (target if moved_in else old).name


def test_what_is_made_once_needs_a_folder_and_the_error_names_the_setting(tmp_path, monkeypatch):
    def made() -> str:
        found = made_once("kind", "stem", "seen", lambda folder: folder.mkdir())
        return found.parent.relative_to(tmp_path).as_posix()

    monkeypatch.setenv("PTQ_CACHE", os.devnull)
    with pytest.raises(CheckpointError, match="null/kind: this user cannot write there. Set PTQ_C"):
        made()
    monkeypatch.delenv("PTQ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert made() == "xdg/ptq/kind"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert made() == "home/.cache/ptq/kind"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a container's user without a name
    with pytest.raises(CheckpointError, match="this user has no home folder. Set PTQ_CACHE"):
        made()


def test_who_reads_the_old_file_reads_it_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as held:
        replace_file(path, b"new")
        assert held.read() == b"old"
    assert path.read_bytes() == b"new"
