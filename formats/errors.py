"""The project's error types.

Every message says what was found, what is allowed, and how to fix it. They live here because
`formats` is the ground that every other package may import.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class PTQError(Exception):
    """Base of every error that is the user's to act on; the commands print it without a trace."""


class RecipeError(PTQError):
    """A recipe, its data or its model cannot be used as asked."""


class CheckpointError(PTQError):
    """A checkpoint is damaged, incomplete or of a kind this project does not read."""


class DiskFullError(CheckpointError):
    """Something could not be written for want of room."""


class RequestError(PTQError):
    """One generation request is invalid; the engine goes on.

    Args:
        message: What was found, what is allowed, how to fix it.
        param: Name of the offending request field, if there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(PTQError):
    """The engine cannot go on: an invariant of its own was broken or a step failed."""


class NoFixedOrderError(EngineError):
    """A device has no kernels that sum what a model multiplies in one order in any step."""


class EngineEndedError(EngineError):
    """A process that the engine needs is gone: it runs nothing any more; make another."""


def suggestion(found: str, allowed: Iterable[str]) -> str:
    """`did you mean ...?` where something close is allowed, then what is."""
    names = list(allowed)
    close = get_close_matches(found, names, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}allowed: {', '.join(names)}"


def typed(*words: str | Path) -> str:
    """One of our commands for a message, in backticks, quoted so that it can be pasted."""
    return f"`{shlex.join(['ptq', *map(str, words)])}`"
