"""Memory: how much this process holds and may still have, and giving back what was freed."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    if STATUS.is_file():  # ru_maxrss may be that of the process that started this one
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Resident memory of this process now; its peak where the system does not tell."""
    return _status_bytes("VmRSS") if STATUS.is_file() else peak_rss_bytes()


def available_bytes() -> int:
    """Memory that processes may still take without swapping, within the limit of a container.

    Where the system does not tell, half of what the machine has.
    """
    if not MEMORY.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    available = _bytes_of(MEMORY, "MemAvailable")
    try:
        limit = int((GROUP / "memory.max").read_text())
        held = int((GROUP / "memory.current").read_text())
        reclaimable = int((GROUP / "memory.stat").read_text().split("inactive_file ")[1].split()[0])
    except (OSError, ValueError, IndexError):  # there is no such group, or it has no limit
        return available
    return min(available, max(0, limit - held + reclaimable))


def _status_bytes(key: str) -> int:
    return _bytes_of(STATUS, key)


def _bytes_of(file: Path, key: str) -> int:
    lines = file.read_text().splitlines()
    line = next(row for row in lines if row.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def release_freed_memory() -> None:
    """Return free pages of the heap to the system; without effect where the C library cannot.

    glibc keeps what large tensors of different sizes leave in its heap, in holes that the
    next ones do not fit: without this, memory held grows with the model although only a layer is
    alive.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
