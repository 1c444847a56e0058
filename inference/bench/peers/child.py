"""What starts in a peer's own interpreter: does a job there, and ends when its parent does.

    python child.py KIND

The parent writes lines of JSON to standard input. The first is the job; its `adapter` is the file
that knows the package. KIND is the file that knows what is asked of such packages: it has
`do(job, adapter, questions, send)`, where `questions` gives the lines that follow, and `send`
writes an answer to what was standard output: the length of a frame in 8 bytes, little-endian, then
JSON or bytes. Whatever goes wrong is a last answer `{"error": ...}`.

The parent keeps standard input open: when it ends, however it ends, this process and all that it
started are killed, whatever they are at. Packages see an empty standard input, and what they print
goes to standard error.

Nothing of this project is imported here, as the peer's environment need not have it. What such
files share they import from `peer_child`, which is this one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any, BinaryIO, TextIO


def load_file(path: str, name: str) -> ModuleType:
    """A file as a module, under a name that shadows no package."""
    module = sys.modules[name] = ModuleType(name)
    SourceFileLoader(name, path).exec_module(module)
    return module


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss may be that of the process that started this one
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def follow_parent() -> Iterator[Any]:
    """What the parent asks, as it comes; when there can be no more, this process ends."""
    lines: SimpleQueue[str] = SimpleQueue()
    pipe = os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    Thread(target=_follow, args=(pipe, lines), daemon=True).start()
    return iter(lambda: json.loads(lines.get()), None)


def _follow(pipe: TextIO, lines: SimpleQueue[str]) -> None:
    for line in pipe:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)  # a session of its own: what the parent started, and no more


def keep_output() -> BinaryIO:
    """What was standard output, for answers alone; what packages print goes to standard error."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def serve(kind: str) -> int:
    """Do the job of the parent's first line; an error is the last answer."""
    questions, out = follow_parent(), keep_output()

    def send(answer: bytes | dict[str, Any]) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        out.write(len(content).to_bytes(8, "little") + content)
        out.flush()

    try:
        job = next(questions)
        adapter = load_file(job["adapter"], "peer_adapter")
        load_file(kind, "peer_kind").do(job, adapter, questions, send)
    except Exception as error:  # whatever a package raises is this process's answer
        traceback.print_exception(error)
        send({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        return 1
    return 0


if __name__ == "__main__":
    del sys.path[0], sys.argv[0]  # this folder: its files are no packages
    sys.modules["peer_child"] = sys.modules[__name__]
    raise SystemExit(serve(sys.argv[0]))
