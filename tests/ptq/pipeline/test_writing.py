"""Work beside the run: one piece at a time, and nothing that goes wrong is lost."""

from __future__ import annotations

import threading
import time

import pytest

from calibrate.workers import BackgroundWriter
from formats.checkpoint.write import CheckpointWriter
from ptq.methods.rtn import RTNSpec
from ptq.pipeline import driver
from ptq.pipeline.solver import BlockSolver
from tests.ptq.quantizing import executed, make_plan


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


def test_tensors_come_in_one_order_however_long_those_outside_of_blocks_take(
    tiny_llama, tmp_path, monkeypatch
):
    """And from one thread at a time."""
    orders: list[list[str]] = []
    solved, adding = threading.Event(), threading.Lock()
    add, emit_rest, solve = CheckpointWriter.add, driver.emit_rest, BlockSolver.solve

    def watched(writer, name, tensor):
        assert adding.acquire(blocking=False), f"{name} was added beside another tensor"
        orders[-1].append(name)
        time.sleep(0.002)
        adding.release()
        add(writer, name, tensor)

    def noted(solver, index):
        block = solve(solver, index)
        solved.set()
        return block

    def late(*args, **kwargs):
        assert solved.wait(60)
        time.sleep(0.2)
        emit_rest(*args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "add", watched)
    monkeypatch.setattr(BlockSolver, "solve", noted)
    for emit in (emit_rest, late):
        orders.append([])
        solved.clear()
        monkeypatch.setattr(driver, "emit_rest", emit)
        plan = make_plan(tiny_llama, tmp_path / str(len(orders)), "w8", methods=(RTNSpec(),))
        executed(plan)
    assert orders[0] == orders[1]
    assert not orders[1][0].startswith("model.layers")
