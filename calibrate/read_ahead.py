"""Tensors of a checkpoint that are read before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class ReadAhead:
    """Reads tensors, those that are expected in a thread of its own.

    They wait in memory that a GPU reaches at full speed.

    Args:
        read: Gives a tensor by its name.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self._read = read
        self._pool: ThreadPoolExecutor | None = None
        self._coming: dict[str, Future[Tensor]] = {}

    def __call__(self, name: str) -> Tensor:
        """A tensor; what was expected is handed out once."""
        coming = self._coming.pop(name, None)
        return self._read(name) if coming is None else coming.result()

    def expect(self, names: Iterable[str]) -> None:
        """Begin to read what will be asked for next; what was expected before is forgotten."""
        for left in self._coming.values():
            left.cancel()
        self._pool = self._pool or ThreadPoolExecutor(1)
        self._coming = {name: self._pool.submit(self._pinned, name) for name in names}

    def _pinned(self, name: str) -> Tensor:
        return self._read(name).pin_memory()
