"""What differs between versions of Triton, and what runs where one refuses a kernel.

Plain kernels are written for every Triton from 3.6 on. Gluon, in which the hand-scheduled kernels
for Hopper are written, is experimental: `kernels.triton.gluon_names` binds the names that changed.
Where a Triton newer than those tested refuses a Gluon kernel, its plain twin runs (`run_gluon`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import triton
from triton.errors import TritonError

TESTED = ((3, 6), (3, 9))  # the oldest and the newest that the tests compile all kernels with
REFUSALS = (TritonError, AttributeError, ImportError, TypeError, ValueError, RuntimeError)

_refused: set[str] = set()


def is_tested() -> bool:
    """Whether the tests cover the Triton that runs; they do not cover what comes after."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) <= TESTED[1]


def run_gluon(kernel: str, launch: Callable[[], None]) -> bool:
    """Launch a Gluon kernel, unless this Triton has refused it before or does so now.

    The first refusal in a process gives one warning, which names the versions. In versions that are
    tested nothing is expected to be refused, and an error is raised as it is.

    Args:
        kernel: Its name, under which a refusal is remembered.
        launch: Imports its module, compiles and launches it.

    Returns:
        Whether it was launched; if not, the caller launches the plain twin.
    """
    if kernel in _refused:
        return False
    try:
        launch()
    except REFUSALS as error:
        if is_tested():
            raise
        if not _refused:
            oldest, newest = (".".join(map(str, version)) for version in TESTED)
            warnings.warn(
                f"Triton {triton.__version__} (torch {torch.__version__}) refuses the Gluon kernel "
                f"of {kernel} ({type(error).__name__}); plain kernels run instead, which are "
                f"slower. Tested are Triton {oldest} to {newest}.",
                stacklevel=2,
            )
        _refused.add(kernel)
        return False
    return True
