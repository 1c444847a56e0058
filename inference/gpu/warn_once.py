"""What is said of layers while they are loaded: in one line where it holds for many."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

log = logging.getLogger("ptq.inference")


@dataclass
class _Said:
    """Layers of which the same is said: the first one's name, how many, their kinds and sizes."""

    first: str
    count: int = 0
    kinds: dict[str, None] = field(default_factory=dict)  # in order
    sizes: dict[tuple[int, ...], None] = field(default_factory=dict)


_said: ContextVar[dict[str, _Said] | None] = ContextVar("said", default=None)


def warn_of(
    names: Sequence[Sequence[str]], what: str, kind: str = "", size: tuple[int, ...] = ()
) -> None:
    """Warn of layers, now or with all of which the same is said (`warnings_together`).

    Args:
        names: Of the modules of each.
        what: With places for their kinds, their sizes, and "it runs" or "they run", or with none.
        kind: Such as their scheme.
        size: Of a weight.
    """
    pending = _said.get()
    said = {} if pending is None else pending
    own = said.setdefault(what, _Said(" + ".join(names[0])))
    own.count += len(names)
    own.kinds[kind] = None
    own.sizes[size] = None
    if pending is None:
        _log(said)


@contextmanager
def warnings_together() -> Iterator[None]:
    """Warnings of layers inside are logged at the end, a line for each kind."""
    said: dict[str, _Said] = {}
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)
        _log(said)


def _log(said: dict[str, _Said]) -> None:
    for what, own in said.items():
        others = f" and {own.count - 1} more" if own.count > 1 else ""
        runs = "they run" if others else "it runs"
        text = what.format(" or ".join(own.kinds), ", ".join(map(str, own.sizes)), runs)
        log.warning("%s%s: %s", own.first, others, text)
