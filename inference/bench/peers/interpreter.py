"""Processes under an interpreter of another environment: what it has, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO

from formats.errors import EngineError

CHILD = Path(__file__).resolve().parent / "child.py"
PROBE_SECONDS = 60.0
PROBE = """
import sys
sys.path.pop(0)  # where we were started: no packages of that interpreter
import json
from importlib import metadata

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def installed(python: str, distributions: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions as an interpreter sees them, None for those that it lacks.

    Raises:
        EngineError: it cannot be started, or is no Python.
    """
    command = [python, "-c", PROBE, *distributions]
    options = {"capture_output": True, "text": True, "timeout": PROBE_SECONDS, "check": True}
    try:
        done = subprocess.run(command, env=clean_environment({}), **options)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(f"{python} cannot be used as a Python interpreter ({error})") from error


def start(
    python: str,
    worker: Path,
    arguments: Iterable[str],
    settings: dict[str, str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    cwd: Path | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a file under an interpreter, in a session of its own; see
    `inference.bench.peers.child`.

    Args:
        python: The interpreter.
        worker: The file.
        arguments: Its own.
        settings: Its environment, beside ours.
        stdout: As of `subprocess.Popen`.
        stderr: Likewise.
        cwd: Likewise.
        pass_fds: Likewise.

    Raises:
        OSError: the interpreter cannot be started.
    """
    return subprocess.Popen(
        [python, str(CHILD), str(worker), *arguments],
        env=clean_environment(settings),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def clean_environment(settings: dict[str, str]) -> dict[str, str]:
    """Ours without what would lead another interpreter to our modules, and settings of its own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | settings


def why_it_ended(code: int, log: Path) -> str:
    """The reason that a process gives: its exit code, and the last line of what it printed."""
    lines = log.read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    killed = " (killed: memory may have run out)" if code == -signal.SIGKILL else ""
    return f"its process ended with exit code {code}{killed}; the last that it printed: {last}"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them ended by themselves
        return
