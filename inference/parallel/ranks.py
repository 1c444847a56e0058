"""The other ranks as rank 0 sees them: their processes, and whether these live and make progress.

Each has two connections: one for its tasks, one for its heartbeats (`news`), which a thread reads.
A rank whose connection ends has died. A rank that has stopped is found by its progress: all ranks
count the same things (`inference.parallel.communication.Progress`), so that one whose count stays
below another's for longer than the engine's patience is taken for stopped; so is one that says
nothing for that long while others wait, which may have stopped amid a collective that all have
counted.

When one fails, all are killed: with their connections closed, whatever rank 0 waits for ends,
too. The other ranks notice the end of rank 0 as their connections close.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from threading import Event, Lock, Thread
from typing import Any, Protocol

from formats.errors import EngineEndedError, PTQError
from inference.parallel.communication import (
    LOADING,
    Failed,
    Heartbeat,
    Progress,
    RankSpec,
    Task,
    packed,
)

LAST_WORDS = 2.0  # seconds in which a process whose connection closed has to end
NOTICED = 5.0  # seconds to wait for the news of a dead rank, where an exchange failed
IDLE = "waiting for work"
STUCK = 70  # exit code of a process that cannot be ended otherwise
DISK = 10  # times as long a rank may take for a layer that it reads
GAPS = 4  # times the longest pause of a rank so far: sooner it is not called stopped


class Member(Protocol):
    """Where a rank runs."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...

    def ended(self, seconds: float) -> str | None:
        """How it ended, if it does within so many seconds."""
        ...


Start = Callable[[int, Connection, Connection], Member]
"""Starts a rank: its number, and its ends of the connections for tasks and for news."""


class RankProcess:
    """A rank in a process of its own; see `Member`.

    Args:
        tasks: Its end of the connection that its tasks come by.
        news: Its end of the one by which it tells of itself.
    """

    def __init__(self, rank: int, tasks: Connection, news: Connection) -> None:
        ends = [tasks.fileno(), news.fileno()]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inference.parallel.worker", *map(str, ends)],
            pass_fds=ends,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the first rank, with which it ends
        )
        self.pid = self._process.pid
        self.name = f"rank {rank} (process {self.pid})"
        tasks.close()
        news.close()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def ended(self, seconds: float) -> str | None:
        """How it ended, if it does within so many seconds."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        memory = " (killed, or memory ran out)" if code == -9 else ""
        return f"died with exit code {code}{memory}"


@dataclass
class Other:
    """A rank and what is known of it."""

    member: Member
    tasks: Connection
    news: Connection
    beat: Heartbeat = field(default_factory=lambda: Heartbeat(0, "starting"))
    moved: float = field(default_factory=time.monotonic)  # when its number last grew
    late: float | None = None  # since when its number is smaller than another's
    heard: float | None = None  # when it last said anything
    gap: float = 0.0  # longest silence, or time in which its number did not grow while it was late


class Ranks:
    """All ranks but the first; a thread of this process watches them.

    Args:
        specs: What each runs, from rank 1 on.
        progress: The first rank's own.
        start: Starts one.
        patience: Seconds for which one may be late.
        stuck: Seconds after which this process ends, too, where what it waits for does not end with
            the others: a kernel of a GPU. None where all of it does.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        progress: Progress,
        start: Start = RankProcess,
        patience: float = 20.0,
        stuck: float | None = None,
    ) -> None:
        self._stuck, self._busy = stuck, False
        self._at_end: list[weakref.WeakMethod[Any]] = []
        self._at_failure: list[weakref.WeakMethod[Any]] = []
        self._progress, self._patience, self._lock = progress, patience, Lock()
        self._failure: str | None = None
        self._failed, self._closed = Event(), Event()
        self._others: list[Other] = []
        self._count = len(specs) + 1
        try:
            for spec in specs:
                self._others.append(_started(spec, start))
        except BaseException:
            self.close()
            raise
        self._thread = Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def members(self) -> list[Member]:
        """Where they run, from rank 1 on."""
        return [other.member for other in self._others]

    def before_end(self, call: Callable[[], None]) -> None:
        """Have a method called, while its object lives, before the ranks end."""
        self._at_end.append(weakref.WeakMethod(call))

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have a method called, while its object lives, where a rank has failed."""
        self._at_failure.append(weakref.WeakMethod(call))

    def send(self, task: Task) -> None:
        """Tell all what to do next.

        Raises:
            EngineEndedError: one is gone.
        """
        self.check()
        message = packed(task)
        try:
            for other in self._others:
                other.tasks.send_bytes(message)
        except OSError as error:
            raise self.failure(error) from error

    def check(self) -> None:
        """Raise EngineEndedError where one has failed, or all have been ended."""
        if self._failure is not None:
            raise EngineEndedError(self._failure)
        if self._closed.is_set():
            raise EngineEndedError("the engine's ranks have been ended; make a new engine")

    def wait_for(self, doing: str) -> None:
        """Wait until all have come to something.

        Raises:
            EngineEndedError: one has failed.
        """
        while any(other.beat.doing != doing for other in self._others):
            self.check()
            self._closed.wait(0.02)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Do something that all ranks do at once; where it fails, the ranks end.

        Raises:
            EngineEndedError: it failed; the rank that it failed on is named.
        """
        self.check()
        self._progress.doing, self._busy = doing, True
        try:
            yield
        except EngineEndedError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        except BaseException:  # Ctrl-C: who waits for this rank would wait for ever
            self._fail("the engine was interrupted amid a step, and has ended; make a new one")
            raise
        finally:
            self._progress.doing, self._busy = IDLE, False

    def failure(self, error: Exception) -> EngineEndedError:
        """Why something failed that all ranks do: because of one of them, or of this one."""
        if isinstance(error, (RuntimeError, OSError)):  # perhaps a connection to who is gone
            self._failed.wait(NOTICED)
        doing = self._progress.doing
        self._fail(f"rank 0 of {self._count} failed while {doing}: {reason_of(error)}")
        assert self._failure is not None
        return EngineEndedError(self._failure)

    def close(self) -> None:
        """End all ranks, in order if they can, and wait until they have."""
        self._closed.set()
        _call(self._at_end)
        for other in self._others:
            with suppress(OSError):
                other.tasks.close()
        end = time.monotonic() + LAST_WORDS
        for other in self._others:
            if other.member.ended(max(0.0, end - time.monotonic())) is None:
                other.member.kill()
                other.member.ended(LAST_WORDS)
            with suppress(OSError):
                other.news.close()

    def _watch(self) -> None:
        """Read what ranks tell of themselves until all have been ended."""
        while not self._closed.is_set() and self._failure is None:
            try:
                for ready in wait([other.news for other in self._others], 0.25):
                    self._read(next(o for o in self._others if o.news is ready))
            except OSError:  # closed meanwhile
                return
            self._look_for_stopped()
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End this process where it waits for a kernel that waits for a rank."""
        if self._failure is None or self._stuck is None:
            return
        end = time.monotonic() + self._stuck
        while self._busy:
            if time.monotonic() > end:
                print(f"error: {self._failure}", file=sys.stderr, flush=True)
                os._exit(STUCK)
            time.sleep(0.1)

    def _read(self, other: Other) -> None:
        try:
            news = other.news.recv()
        except (EOFError, ConnectionError):
            ended = other.member.ended(LAST_WORDS) or "closed its connection"
            self._fail(
                f"{self._named(other)} {ended} while {self._at(other)}. The engine has ended"
            )
            return
        now, heard = time.monotonic(), other.heard
        other.gap, other.heard = max(other.gap, now - (heard or now)), now
        if isinstance(news, Failed):
            self._fail(f"{self._named(other)} failed while {news.doing}: {news.why}")
        elif news.count > other.beat.count:
            if other.late is not None:
                other.gap = max(other.gap, now - max(other.moved, other.late))
            other.beat, other.moved, other.late = news, now, None
        else:
            other.beat = news

    def _look_for_stopped(self) -> None:
        """Find a rank that others wait for, and that does not go on."""
        most = max(self._progress.count, *(other.beat.count for other in self._others))
        now, until = time.monotonic(), self._progress.until
        if until is not None and now > until:
            at = "; ".join(f"{self._named(other)} is {self._at(other)}" for other in self._others)
            self._fail(
                f"rank 0 of {self._count} has waited too long for its GPU while "
                f"{self._progress.doing}: a collective (NCCL's gather of logits, broadcast of "
                f"tokens, or sum of many rows) does not end. {at}. The engine has ended"
            )
            return
        for other in self._others:
            other.late = None if other.beat.count >= most else other.late or now
            waited = now - (other.heard or now) if self._busy else 0.0
            if other.late is not None:
                waited = max(waited, now - max(other.late, other.moved))
            patience = self._patience * (DISK if other.beat.doing == LOADING else 1)
            if waited > max(patience, GAPS * other.gap):
                self._fail(
                    f"{self._named(other)} has stopped while {self._at(other)}: the others have "
                    f"waited for it for {waited:.0f} s. The engine has ended"
                )

    def _at(self, other: Other) -> str:
        """What a rank was at: what it said last, or the task that it was given since."""
        doing = other.beat.doing
        return self._progress.doing if doing == IDLE else doing

    def _named(self, other: Other) -> str:
        return f"{other.member.name} of {self._count}"

    def _fail(self, why: str) -> None:
        """Keep the first reason, and end all ranks."""
        with self._lock:
            if self._failure is not None or self._closed.is_set():
                return
            self._failure = why
        for other in self._others:
            other.member.kill()
        for other in self._others:
            other.member.ended(LAST_WORDS)
        _call(self._at_failure)
        self._failed.set()


def _call(methods: list[weakref.WeakMethod[Any]]) -> None:
    for method in methods:
        call = method()
        if call is not None:
            call()


def _started(spec: RankSpec, start: Start) -> Other:
    ends: Any = Pipe(), Pipe()
    (tasks, its_tasks), (news, its_news) = ends
    member = start(spec.rank, its_tasks, its_news)
    with suppress(OSError):  # it has died, which the watching thread finds
        tasks.send(spec)
    return Other(member, tasks, news)


def reason_of(error: Exception) -> str:
    """What a message says of an error: of one that is not ours its type, too."""
    return str(error) if isinstance(error, PTQError) else f"{type(error).__name__}: {error}"
