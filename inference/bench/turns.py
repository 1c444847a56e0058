"""Models that take turns, A B A B ...: what the machine does meanwhile hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from formats.errors import RequestError
from inference.bench.figures import Speed, summarize
from inference.bench.load import Load, Run
from kernels.bench.timing import in_turns

Runner = Callable[[Load], Run]


def measure_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[Speed]:
    """Measure models that take turns: A B A B ...

    Args:
        runners: Run a load once; see `inference.bench.load.run_once`.
        load: What each run does.
        warmup: Runs of each before those that count.
        repeats: Runs that count; at least 1.

    Raises:
        RequestError: no run would count, or an engine cannot hold the load.
        EngineError: a request did not end as it should.
    """
    return [summarize(load, runs) for runs in run_in_turns(runners, load, warmup, repeats)]


def run_in_turns(
    runners: Sequence[Runner], load: Load, warmup: int = 1, repeats: int = 3
) -> list[list[Run]]:
    """The runs behind `measure_in_turns`: of each model those that count, in order."""
    if warmup < 0 or repeats < 1:
        raise RequestError(
            f"repeats: found {repeats} after {warmup} warm-up runs; at least one run must count",
            "repeats",
        )
    runs = in_turns([partial(runner, load) for runner in runners], range(warmup + repeats))
    return [own[warmup:] for own in runs]
