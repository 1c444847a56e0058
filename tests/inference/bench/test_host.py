"""A step of decodes costs the host no Python for each request."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is in the `test` extra)")
from formats.command import run_command
from inference.bench import command as bench
from inference.bench.steps import make_loop


def calls_of_a_step(batch: int) -> Counter[str]:
    """Calls of Python functions, and of others from Python, by name."""
    loop, found = make_loop(batch, 64 * 3 + 5, staggered=False), Counter[str]()
    for _ in range(3):
        loop.step()

    def count(frame, event, argument):
        if event == "call":
            found[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            found[argument.__name__] += 1

    sys.setprofile(count)
    try:
        told = loop.step()
    finally:
        sys.setprofile(None)
    assert (len(told.names), set(told.tokens), told.finished) == (batch, {1}, [])
    return found


def test_a_step_of_many_makes_as_many_calls_as_one_of_few():
    few, many = calls_of_a_step(16), calls_of_a_step(256)
    assert many - few == Counter(), "once for each request, or for some"
    assert sum(many.values()) < 250


def test_the_host_alone_is_measured_without_a_gpu(capsys):
    assert run_command(bench.measure_steps, ["--host", "--batch", "2", "--context", "70"]) == 0
    assert capsys.readouterr().out.startswith("host alone, batch   2: ")
