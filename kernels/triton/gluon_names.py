"""What kernels in Gluon share: names that changed between Triton 3.6 and 3.9, and how they wait."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import tma


def first_of(module: Any, *names: str) -> Any:
    """What a module has under one of several names; of those that it has the first counts.

    Raises:
        AttributeError: it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} has none of {', '.join(names)}")


barrier = first_of(language, "barrier", "thread_barrier")  # of a program's threads
tma_load = first_of(tma, "async_load", "async_copy_global_to_shared")
tma_store = first_of(tma, "async_store", "async_copy_shared_to_global")


@gluon.jit
def wait_ahead(OVERLAP: language.constexpr):
    """As `kernels.triton.common.wait`."""
    if OVERLAP:
        language.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=language.int32, is_pure=False, pack=1
        )
