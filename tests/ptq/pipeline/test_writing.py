"""Work beside the run: one piece at a time, and nothing that goes wrong is lost."""

from __future__ import annotations

import time

import pytest

from ptq.pipeline.writing import BackgroundWriter


def test_pieces_are_done_one_after_the_other_and_all_before_it_is_left():
    done: list[int] = []

    def slow(number: int) -> None:
        time.sleep(0.01)
        done.append(number)

    with BackgroundWriter() as writer:
        for number in range(3):
            writer.put(lambda number=number: slow(number))
            assert len(done) >= number
    assert done == [0, 1, 2]


def fail() -> None:
    raise OSError("no room")


def test_what_goes_wrong_is_raised_by_the_next_call_or_at_the_end():
    writer = BackgroundWriter()
    writer.put(fail)
    with pytest.raises(OSError, match="no room"):
        writer.put(lambda: None)
    with pytest.raises(OSError, match="no room"), BackgroundWriter() as writer:
        writer.put(fail)
    writer = BackgroundWriter()
    writer.put(fail)
    writer.__exit__(ValueError, ValueError("what went wrong first"), None)  # and is raised
