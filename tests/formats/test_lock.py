"""One process at a time works in an output folder; a lock never outlives its process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from formats.errors import CheckpointError
from formats.files import LOCK_FILE, output_locked, refuse_busy, target_locked

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from formats.files import output_locked, target_locked
with {"output": output_locked, "target": target_locked}[sys.argv[1]](Path(sys.argv[2])):
    print("locked", flush=True)
    time.sleep(60)
"""


def hold(kind: str, folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.parametrize(("kind", "lock"), [("output", output_locked), ("target", target_locked)])
def test_a_second_process_is_told_of_the_first_and_a_killed_one_blocks_nobody(tmp_path, kind, lock):
    folder = tmp_path / "deep" / "out"
    process = hold(kind, folder)
    try:
        with pytest.raises(CheckpointError) as caught, lock(folder):
            raise AssertionError("two at once")
        told = str(caught.value)
        assert f"It is process {process.pid} on " in told
        assert sys.executable in told
        assert "since 20" in told
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = (path for path in (tmp_path / "deep").rglob("*") if path.is_file())
    assert left.name.endswith(LOCK_FILE)
    with lock(folder):
        pass
    assert not (tmp_path / "deep" / "out").exists()
    assert list((tmp_path / "deep").iterdir()) == []


def test_nothing_is_left_of_a_lock(tmp_path):
    with output_locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with output_locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


def test_a_folder_that_is_to_be_replaced_may_be_at_work(tmp_path):
    with output_locked(tmp_path / "out"):
        for refused in (target_locked(tmp_path / "out"), output_locked(tmp_path / "out")):
            with pytest.raises(CheckpointError, match="another process works there"), refused:
                raise AssertionError("two at once")
        with pytest.raises(CheckpointError, match=f"It is process {os.getpid()} on"):
            refuse_busy(tmp_path / "out")
    refuse_busy(tmp_path / "out")


def test_a_lock_that_was_removed_while_one_waited_for_it_is_not_taken(tmp_path, monkeypatch):
    path, taken, flock = tmp_path / "out" / LOCK_FILE, [], fcntl.flock

    def flock_and_lose(file, kind):
        flock(file, kind)
        taken.append(kind)
        if len(taken) == 1:  # as if its holder had ended in between
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock_and_lose)
    with output_locked(tmp_path / "out"):
        assert len(taken) == 2
        assert path.is_file()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CheckpointError, match=r"No locks available.*on a local disk"),
        output_locked(tmp_path / "out"),
    ):
        raise AssertionError("not locked")
    assert list(tmp_path.iterdir()) == []
