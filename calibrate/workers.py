"""Work on several devices at once: a thread for each of them, in one process.

Threads, as torch lets go of the interpreter while kernels run, and as all of them then read samples
and blocks from one memory: processes would each hold these once more, and send every result. Which
of them does what changes no result: samples and layers have numbers, and results are taken in
order.

Samples that several devices run through one block.

What is kept of them is the same, bit for bit, however many devices there are. Maxima and counts do
not depend on the order of samples; sums of floats do. So neighbouring samples form runs, at most
`RUNS` of them whatever the number of devices; a run is summed by the device that takes it, sample
by sample, and then added to the sum of those before it.

Tensors of a checkpoint are read before they are asked for (`ReadAhead`), and what is made of a
block is written while the next one is at work (`BackgroundWriter`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from calibrate.block import DecoderBlock
from calibrate.transfers import run_size

T = TypeVar("T")
WAKE = 0.1  # seconds after which whoever waits looks whether to go on


@dataclass(frozen=True)
class Task(Generic[T]):
    """One piece of work.

    Attributes:
        what: Its name in the message of an error: `solving model.layers.0.mlp.down_proj`.
        cost: How long it takes, in any unit.
        run: Does it, on the worker of a number.
    """

    what: str
    cost: float
    run: Callable[[int], T]


class _StoppedError(Exception):
    """Another worker has failed, or the run was interrupted."""


class Workers:
    """A thread for each of some devices, for as long as there is work.

    Args:
        devices: Where they work; a device may stand there more than once, as the CPU does in tests.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        assert devices
        self.devices = tuple(devices)
        self._stop = threading.Event()

    def __len__(self) -> int:
        return len(self.devices)

    def each(self, what: str, run: Callable[[int], T]) -> list[T]:
        """What `run` gives for the number of every worker, all at once.

        Args:
            what: Their name in the message of an error.
            run: Does it; looks now and then whether to go on (`check`).

        Raises:
            Exception: what the first of them met that failed, with a note of which it was.
        """
        return self.spread([Task(what, 0.0, run) for _ in self.devices], range(len(self.devices)))

    def spread(self, tasks: Sequence[Task[T]], places: Sequence[int] | None = None) -> list[T]:
        """Results of tasks, in their order; each is done by one worker, the longest ones first.

        Args:
            tasks: Of which none waits for another one of the same worker.
            places: The worker of each; None leaves that to their costs.

        Raises:
            Exception: what the first of them met that failed, with a note of which it was.
        """
        if len(self) == 1:
            return [task.run(0) for task in tasks]
        places = places or shares([task.cost for task in tasks], len(self))
        results: dict[int, T] = {}
        failures: list[BaseException] = []
        self._stop.clear()

        def work(worker: int) -> None:
            mine = [i for i, place in enumerate(places) if place == worker]
            for i in sorted(mine, key=lambda i: -tasks[i].cost):
                if self._stop.is_set():
                    return
                try:
                    device = self.devices[worker]
                    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                        results[i] = tasks[i].run(worker)
                except _StoppedError:
                    return
                except BaseException as error:  # raised by the thread that waits for all of them
                    error.add_note(f"It happened on {self.name(worker)}, {tasks[i].what}.")
                    failures.append(error)
                    self._stop.set()
                    return

        self._run(work, sorted(set(places)))
        if failures:
            raise failures[0]
        return [results[i] for i in range(len(tasks))]

    def _run(self, work: Callable[[int], None], used: Sequence[int]) -> None:
        """Let some workers work, and wait for them; an interrupt ends them, too.

        Events are waited for, as an interrupted `join` takes a thread that runs for one that ended.
        """
        ended = list[tuple[threading.Event, threading.Thread]]()

        def begin(worker: int) -> None:
            end = threading.Event()

            def run() -> None:
                try:
                    work(worker)
                finally:
                    end.set()

            thread = threading.Thread(target=run, name=self.name(worker))
            ended.append((end, thread))  # an interrupt may come while it starts
            thread.start()

        try:
            for worker in used:
                begin(worker)
            for end, _ in ended:
                while not end.wait(WAKE):  # signals are looked at in between
                    pass
        finally:
            self._stop.set()
            for end, thread in ended:
                if thread.ident is not None:  # what has not begun by now finds itself stopped
                    end.wait()
                    thread.join()

    def check(self) -> None:
        """End the work of a worker whose results nobody waits for any longer."""
        if len(self) > 1 and self._stop.is_set():
            raise _StoppedError

    def name(self, worker: int) -> str:
        """What a person calls a worker."""
        device = self.devices[worker]
        if self.devices.count(device) == 1:
            return str(device)
        return f"worker {worker + 1} of {len(self)} on {device}"


class InTurn:
    """Has workers do something in a fixed order, whichever of them comes first.

    Args:
        workers: All that take turns; where one fails, none is waited for.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._next = workers, 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all turns before this one, from 0 on, are over; then have it."""
        with self._changed:
            while self._next != number:
                self._workers.check()
                self._changed.wait(WAKE)
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()


def shares(costs: Sequence[float], workers: int) -> list[int]:
    """Which worker takes each of some tasks: the longest first, to whoever is free the earliest."""
    until, places = [0.0] * workers, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        places[i] = min(range(workers), key=lambda w: (until[w], w))
        until[places[i]] += costs[i]
    return places


def samples_of(worker: int, count: int, workers: int) -> list[int]:
    """Which of `count` samples a worker takes: run i goes to worker i modulo their number."""
    size = run_size(count)
    return [i for i in range(count) if i // size % workers == worker]


def in_order_of_samples(found: Sequence[Sequence[Tensor]], count: int) -> list[Tensor]:
    """What each worker made of its samples, as one list of all `count` samples."""
    each = {
        sample: state
        for worker, states in enumerate(found)
        for sample, state in zip(samples_of(worker, count, len(found)), states, strict=True)
    }
    return [each[sample] for sample in range(count)]


class BlockWorkers(Workers):
    """Workers with copies of one block, the block itself on the first device.

    Copies are made before the work begins, while nobody looks at the block's layers, and again once
    it has changed. On one device all share the weights.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._blocks: list[DecoderBlock] = []

    def take(self, block: DecoderBlock) -> None:
        """Begin to work on a block, or on what a method has made of it."""
        self._blocks = [block, *(block.to(device) for device in self.devices[1:])]

    def leave(self) -> None:
        """Free the copies: the block is done."""
        self._blocks = []

    def block(self, worker: int) -> DecoderBlock:
        """The block, for a worker."""
        return self._blocks[worker]

    def outputs(self) -> list[Tensor]:
        """`DecoderBlock.outputs` of the block, each worker with its samples."""

        def run(worker: int) -> list[Tensor]:
            block = self.block(worker)
            chosen = samples_of(worker, len(block.inputs), len(self))
            return block.outputs(samples=chosen, begin=lambda _: self.check())

        found = self.each(f"running samples through {self.block(0).name}", run)
        return in_order_of_samples(found, len(self.block(0).inputs))


class ReadAhead:
    """Reads tensors, those that are expected in a thread of its own.

    They wait in memory that a GPU reaches at full speed.
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
