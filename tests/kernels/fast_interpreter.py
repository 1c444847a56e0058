"""Triton's interpreter without what it does again and again.

With each call of a device function it looks through all of Triton's language for what to replace by
its own, and has replaced it when the kernel was launched: that took half of the time of tests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def hasten() -> None:
    """Have device functions of this process replace what is not replaced yet, and no more."""
    from triton.runtime import interpreter

    interpreter.InterpretedFunction.__call__ = _call


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a device function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    if any(is_builtin(language.load) for language in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _languages(function: Callable) -> list[ModuleType]:
    """The modules of Triton's language that a function's module knows."""
    import triton.language as tl

    known = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return [value for value in known if value in (tl, tl.core)]
