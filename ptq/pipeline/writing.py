"""Writing that goes on while the next block is solved: one piece of work at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType


class BackgroundWriter:
    """Does one thing at a time in a thread of its own; a context manager.

    Leaving the context waits for the last one, and raises what went wrong with it unless something
    else did.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(*(() if kind is None else (Exception,))):
            self.close()

    def close(self) -> None:
        """Wait for the last, and take no more; raises what went wrong with it."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def put(self, work: Callable[[], None]) -> None:
        """Begin some work once the last is done; raises what went wrong with the last."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the last; raises what went wrong with it."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
