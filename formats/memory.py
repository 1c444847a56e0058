"""Memory that was freed, given back to the system.

glibc keeps what large tensors of different sizes leave behind in its heap, in holes that the next
ones do not fit: without this, memory held grows with the model although only a layer is alive.
"""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Return free pages of the heap to the system; without effect where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
