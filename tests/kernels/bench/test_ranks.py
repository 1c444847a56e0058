"""Ranks that are measured: whoever stands still is named with what it was at."""

import queue
import time
from types import SimpleNamespace

import pytest

from kernels.bench import all_reduce

ALIVE = SimpleNamespace(exitcode=None)


def collected(*news):
    answers = queue.Queue()
    for one in news:
        answers.put(one)
    return all_reduce._collect([ALIVE, ALIVE], answers)


def test_answers_come_by_rank():
    news = (1, "at", "summing"), (1, "found", "b"), (0, "found", "a")
    assert collected(*news) == ["a", "b"]


def test_who_fails_is_named_with_what_it_did():
    with pytest.raises(RuntimeError, match="rank 1 failed while summing by two_shot:\nTraceback"):
        collected((1, "at", "summing by two_shot"), (1, "failed", "Traceback"))


def test_who_stands_still_ends_all(monkeypatch):
    monkeypatch.setattr(all_reduce, "STILL", 0.3)
    start = time.monotonic()
    message = (
        "ranks stand still, for 0.3 seconds or more: rank 0 has ended; rank 1 is summing 16 rows"
    )
    with pytest.raises(RuntimeError, match=message):
        collected((0, "found", 1), (1, "at", "summing 16 rows"))
    assert time.monotonic() - start < 5
