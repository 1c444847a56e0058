"""Workers on several devices: order, shares, interrupts; tensors that are read ahead."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest
import torch

from calibrate.transfers import RUNS
from calibrate.workers import InTurn, ReadAhead, Task, Workers, samples_of, shares
from formats.errors import CheckpointError

CPU = torch.device("cpu")


def test_an_interrupt_ends_all_workers():
    workers, began, ended = Workers([CPU, CPU]), threading.Barrier(3), list[int]()

    def wait(worker: int) -> None:
        began.wait()
        try:
            while True:
                workers.check()
        finally:
            time.sleep(0.1)
            ended.append(worker)

    def interrupt() -> None:
        began.wait()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.each("waiting", wait)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]
    thread.join()


def test_turns_are_taken_in_order():
    workers, taken = Workers([CPU] * 3), list[int]()
    turns = InTurn(workers)

    def take(numbers: tuple[int, ...], _: int) -> None:
        for number in numbers:
            with turns.turn(number):
                taken.append(number)

    runs = ((2, 5), (1, 4), (0, 3))
    workers.spread([Task("taking", 1.0, partial(take, numbers)) for numbers in runs])
    assert taken == [0, 1, 2, 3, 4, 5]


def test_long_tasks_are_shared_out_first():
    assert shares([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert shares([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    workers, done = Workers([CPU] * 2), list[int]()
    tasks = [
        Task("one", float(i % 3), partial(lambda i, w: (done.append(i), w), i)) for i in range(7)
    ]
    places = shares([task.cost for task in tasks], 2)
    assert [worker for _, worker in workers.spread(tasks)] == places
    assert sorted(done) == list(range(7))


@pytest.mark.parametrize("count", [0, 1, 5, RUNS, 40, 128])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_every_sample_is_taken_once(count, workers):
    taken = [samples_of(worker, count, workers) for worker in range(workers)]
    assert sorted(i for each in taken for i in each) == list(range(count))
    assert all(each == sorted(each) for each in taken)
    if count >= RUNS:
        assert max(map(len, taken)) <= -(-RUNS // workers) * -(-count // RUNS)


def test_what_is_expected_is_read_once_and_handed_out(monkeypatch):
    """As it is where it is read when it is asked for."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which needs a GPU
    read: list[str] = []

    def reader(name: str) -> torch.Tensor:
        read.append(name)
        if name == "gone":
            raise CheckpointError("gone is missing")
        return torch.full((2,), float(len(name)))

    ahead = ReadAhead(reader)
    ahead.expect(["a", "bb", "gone"])
    assert ahead("bb").tolist() == [2, 2]
    assert ahead("ccc").tolist() == [3, 3]
    assert sorted(read) in (["a", "bb", "ccc"], ["a", "bb", "ccc", "gone"])
    with pytest.raises(CheckpointError, match="gone is missing"):
        ahead("gone")
    ahead.expect(["bb"])  # a is forgotten
    ahead("a")
    ahead("bb")
    assert (read.count("a"), read.count("bb")) == (2, 2)
