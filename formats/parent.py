"""Ending with the process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # Linux, prctl(2): a signal for when the parent dies


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent dies, whatever it does then; on Linux.

    Args:
        parent: Its process id; if that is no longer the parent, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
