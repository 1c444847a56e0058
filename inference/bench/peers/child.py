"""What starts in a peer's own interpreter: runs a file there, and ends when its parent does.

    python child.py FILE ARGUMENTS...

FILE has `main(arguments, lines) -> int`, where `lines` are those that the parent writes to standard
input. The parent keeps that open: when it ends, however it ends, this process and all that it
started are killed, whatever they are at. Packages see an empty standard input.

Nothing of this project is imported here, as the peer's environment need not have it. What such
files share they import from `peer_child`, which is this one.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import TextIO


def load_file(path: str, name: str) -> ModuleType:
    """A file as a module, under a name that shadows no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_adapter(path: str) -> ModuleType:
    """The adapter of a job."""
    return load_file(path, "peer_adapter")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may be that of the process that started this one
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reason_of(error: Exception) -> str:
    """An error as one line for the parent; its trace goes to standard error."""
    traceback.print_exception(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def follow_parent() -> SimpleQueue[str]:
    """Lines from the parent, as they come; when there can be no more, this process ends."""
    lines: SimpleQueue[str] = SimpleQueue()
    pipe = os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    Thread(target=_follow, args=(pipe, lines), daemon=True).start()
    return lines


def _follow(pipe: TextIO, lines: SimpleQueue[str]) -> None:
    for line in pipe:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)  # a session of its own: what the parent started, and no more


if __name__ == "__main__":
    del sys.path[0], sys.argv[0]  # this folder: its files are no packages
    sys.modules["peer_child"] = sys.modules[__name__]
    worker = load_file(sys.argv[0], "peer_worker")
    raise SystemExit(worker.main(sys.argv[1:], follow_parent()))
