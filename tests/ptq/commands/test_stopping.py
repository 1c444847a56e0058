"""What is told of a run that was stopped: by Ctrl-C, by SIGTERM, by a full disk; and of the next."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from formats.command import run_command
from formats.files import LOCK_FILE
from inference import predict
from ptq.commands import convert, peers, quantize, report, run, solve
from ptq.output import RESUME_FOLDER
from ptq.pipeline import resume
from ptq.pipeline.reuse import differences
from tests.interrupts import take_interrupts
from tests.ptq.quantizing import write_recipe

pytestmark = pytest.mark.usefixtures("unpictured")
ROOT = Path(__file__).resolve().parents[3]
METHODS = [{"smoothquant": {"alpha": 0.5, "search_samples": 1}}, "rtn"]
SLOW = """
import sys, time
from ptq.pipeline import resume, solver
resume.SHARE = 1e9
solve = solver.BlockSolver.solve
def wait(self, index):
    if index == 2:
        print("at work", flush=True)
        time.sleep(60)
    return solve(self, index)
solver.BlockSolver.solve = wait
from formats.command import run_command
from ptq.commands.run import main
for _ in range(2):
    print(run_command(main, ["r.yaml", "--quiet"]), flush=True)
"""


@pytest.fixture
def here(tmp_path, monkeypatch, make_model) -> Path:
    """A current folder with a recipe of a model of four blocks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "SHARE", 1e9)
    write_recipe(tmp_path, make_model("llama", layers=4), scheme="a8w8", methods=METHODS)
    return tmp_path


def stop(folder: Path, *signals: signal.Signals) -> tuple[list[int], str]:
    """Exit codes and standard error of runs that each get a signal at their third block."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_interrupts,
    )
    assert process.stdout is not None
    codes = []
    for number in signals:
        assert "text.py: one document: " in process.stdout.readline()
        assert process.stdout.readline() == "at work\n"
        process.send_signal(number)
        codes.append(int(process.stdout.readline()))
    return codes, process.communicate()[1]


def test_ctrl_c_and_sigterm_say_what_is_kept_and_the_next_run_what_it_does(here, capsys):
    codes, told = stop(here, signal.SIGINT, signal.SIGTERM)
    assert codes == [130, 143]
    kept = "2 of 4 blocks are kept: the same command goes on from there."
    assert told.splitlines() == ["interrupted", kept, "terminated", kept]
    assert not (here / "out" / LOCK_FILE).exists()
    assert run_command(run.main, ["r.yaml", "--set", "report.thresholds.kl=9"]) == 0
    error = capsys.readouterr().err
    assert "out: an earlier run was stopped; going on at block 3 of 4\n" in error
    assert not (here / "out" / RESUME_FOLDER).exists()


def test_another_run_says_what_differs_and_starts_over(here, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        _stop_at(patch, 3, KeyboardInterrupt())
        assert run_command(run.main, ["r.yaml"]) == 130
    capsys.readouterr()
    other = ["r.yaml", "--set", "methods.0.smoothquant.alpha=1"]
    other += ["--set", "dataset.calibration.seed=1", "--set", "report.thresholds.kl=1"]
    assert run_command(run.main, other) == 0
    told = capsys.readouterr().err
    assert "out: an earlier run was stopped after 2 of 4 blocks, but other than this one" in told
    assert "starting over. What differs:\n" in told
    assert "\n  methods.0.smoothquant.alpha: 0.5, now 1.0\n" in told
    assert "\n  dataset.calibration.seed: 0, now 1\n" in told
    assert "going on" not in told


@pytest.mark.parametrize(("more", "parts"), [([], 4), (["--set", "budget={kl: 9}"], 5)])
def test_a_full_disk_says_what_is_kept_and_the_next_run_uses_it(
    more, parts, here, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        _stop_at(patch, 3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert run_command(run.main, ["r.yaml", *more]) == 2
    told = capsys.readouterr().err
    assert "the disk is full" in told
    assert told.endswith(f"\n2 of {parts} blocks are kept: the same command goes on from there.\n")
    assert "nothing was kept" not in told
    assert run_command(run.main, ["r.yaml", *more]) == 0
    assert f"going on at block 3 of {parts}" in capsys.readouterr().err


def test_a_disk_that_is_full_from_the_start_keeps_nothing(here, capsys, monkeypatch):
    _stop_at(monkeypatch, 1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert run_command(run.main, ["r.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.endswith("\nNo block is kept yet: the same command starts from the beginning.\n")
    assert not (here / "out").exists()


def test_quiet_leaves_the_result(here, capsys):
    assert run_command(run.main, ["r.yaml", "--quiet"]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert "checkpoint: out/checkpoint" in found.out


@pytest.mark.parametrize(
    "command", [run, solve, quantize, report, convert, peers, predict], ids=lambda c: c.__name__
)
def test_every_command_with_progress_can_be_quiet(command):
    assert "--quiet" in command.parser().format_help()


def test_what_differs_is_told_by_its_name():
    def facts(recipe: object, **others: str) -> dict[str, str]:
        return {"recipe": json.dumps(recipe), **others}

    one = facts({"methods": [{"name": "rtn", "scale": "mse"}], "x": {"y": [1, 2]}}, torch="2.11")
    two = facts({"methods": [{"name": "shift"}], "x": {"y": [1]}}, torch="2.12")
    assert differences(one, one) == []
    assert differences(one, two) == [
        "methods.0.rtn.scale: mse, now none",
        "x.y: [1, 2], now [1]",
        "methods.0.shift: none, now given",
        "torch: 2.11, now 2.12",
    ]
    data, plan = "the calibration data", "the plan"
    assert differences({data: "a", plan: "b"}, {data: "c", plan: "d"}) == [data]
    assert differences({plan: "b"}, {plan: "d"}) == [plan]


def _stop_at(patch: pytest.MonkeyPatch, block: int, error: BaseException) -> None:
    """Let the writing of a block, counted from 1, fail."""
    save_block, count = resume.ResumableRun._save_block, []

    def failing(self, name, solved):
        count.append(name)
        if len(count) == block:
            with resume.writing(self._folder):
                raise error
        save_block(self, name, solved)

    patch.setattr(resume.ResumableRun, "_save_block", failing)
