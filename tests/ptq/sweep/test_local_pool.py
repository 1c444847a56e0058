"""Sweeps on this machine: what runs at once, what fails, what goes on where it was."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from formats.errors import RequestError
from ptq.sweep.pools import LocalPool
from ptq.sweep.tasks import left_to_run
from tests.ptq.sweep.sweeping import STAND_IN, stand_in, task  # noqa: F401 (a fixture)
from tests.refusals import refused_request

pytestmark = pytest.mark.usefixtures("stand_in")


def started(folder) -> list[str]:
    return (folder / "started").read_text().splitlines()


def test_tasks_end_as_their_runs_do(tmp_path):
    tasks = [
        task(tmp_path, "well"),
        task(tmp_path, "red", "code=1"),
        task(tmp_path, "sick", "fail=1"),
        task(tmp_path, "shot", "die=9"),
    ]
    found = {one.recipe: outcome for one, outcome in LocalPool(2).run(tasks)}
    assert {name: outcome.state for name, outcome in found.items()} == {
        "well": "passed",
        "red": "missed",
        "sick": "failed",
        "shot": "failed",
    }
    assert found["sick"].error == "out of luck\n  and out of power"
    assert found["shot"].error == "its process was ended by signal 9, as where memory ran out"
    assert found["well"].error is None
    assert [one.recipe for one in left_to_run(tasks)] == ["sick", "shot"]
    assert tasks[2].command == f"ptq run recipe --set fail=1 --output {tmp_path}/sick"
    assert "some lines before" in tasks[2].log.read_text()


def test_as_many_run_at_once_as_there_are_cores_and_gpus(tmp_path):
    sizes = [(2, 0), (1, 1), (1, 0), (1, 1), (3, 0)]
    tasks = [
        task(tmp_path, f"t{i}", "seconds=0.3", cpus=cpus, gpus=gpus)
        for i, (cpus, gpus) in enumerate(sizes)
    ]
    pool = LocalPool(3, ["5"])
    pool.check(tasks)
    order = [one.recipe for one, _ in pool.run(tasks)]
    assert set(order[:2]) == {"t0", "t1"}  # all three cores
    assert set(order[2:4]) == {"t2", "t3"}
    told = dict(line.split(" ", 1) for line in started(tmp_path))
    assert told["t0"] == "2 -1"  # it sees no GPU
    assert told["t1"] == told["t3"] == "1 5"


def test_what_can_never_run_is_told_before_anything_runs(tmp_path):
    for needed in ({"cpus": 4}, {"gpus": 1}):
        with pytest.raises(RequestError, match="this machine has 3 and 0; lower its `resources`"):
            LocalPool(3).check([task(tmp_path, "large", **needed)])


def test_an_interrupted_sweep_goes_on_and_leaves_nothing_running(tmp_path):
    tasks = [task(tmp_path, "first"), task(tmp_path, "second", "seconds=60")]
    running = LocalPool(1).run(tasks)
    assert next(running)[0].recipe == "first"
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt_once_started(running, tmp_path, 2)
    assert time.monotonic() - begun < 20
    assert not [p for p in psutil.Process().children() if "standing_in" in str(p.cmdline())]
    assert [one.recipe for one in left_to_run(tasks)] == ["second"]
    again = [task(tmp_path, "first"), task(tmp_path, "second")]
    assert [one.recipe for one, _ in LocalPool(1).run(left_to_run(again))] == ["second"]
    assert [line.split()[0] for line in started(tmp_path)] == ["first", "second", "second"]


def interrupt_once_started(running, folder, count: int) -> None:
    """Wait for the next task, and be interrupted when so many have started."""

    def interrupt(*_) -> None:
        if len(started(folder)) >= count:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.1)
    next(running)


def test_a_run_whose_watcher_was_killed_counts_by_its_report(tmp_path):
    one = task(tmp_path, "orphan")
    list(LocalPool(1).run([one]))
    (outcome,) = [one.ended()]
    one.write(outcome.model_copy(update={"state": "started"}))
    assert one.ended().state == "passed"
    (one.output / "report/report.json").write_text('{"passed": false}')
    assert one.ended().state == "missed"


def test_a_folder_with_another_run_is_refused(tmp_path):
    one = task(tmp_path, "mine")
    list(LocalPool(1).run([one]))
    changed = type(one)(**vars(one) | {"settings": "1" * 64})
    refused_request("mine holds a run that is of other settings", left_to_run, [changed])
    one.record.unlink()
    refused_request("no sweep's; remove it", left_to_run, [one])


def test_a_task_ends_with_the_process_that_watches_it(tmp_path):
    """The real child, whose watcher is killed: it must not go on working in its folder."""
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'ptq.sweep.pools', str(os.getpid()), "
        "'completion', '--help'])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert b"usage" not in done.stdout  # it ended before it had loaded the command
    words = [sys.executable, "-m", "ptq.sweep.pools", str(os.getpid()), "completion", "--help"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout[:22]) == (0, "usage: ptq completion ")
    assert STAND_IN
