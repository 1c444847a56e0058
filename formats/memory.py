"""Memory of this process: how much it holds, and giving back what was freed."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if STATUS.is_file():  # ru_maxrss may be that of the process that started this one
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Resident memory of this process now; its peak where the system does not tell."""
    return _status_bytes("VmRSS") if STATUS.is_file() else peak_rss_bytes()


def _status_bytes(key: str) -> int:
    lines = STATUS.read_text().splitlines()
    line = next(row for row in lines if row.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def release_freed_memory() -> None:
    """Return free pages of the heap to the system; without effect where the C library cannot.

    glibc keeps what large tensors of different sizes leave behind in its heap, in holes that the
    next ones do not fit: without this, memory held grows with the model although only a layer is
    alive.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
