"""The time of a run is told by its first block, and telling it leaves no trace."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from calibrate.sinks import find_peaks
from ptq.commands import check
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline import solver
from ptq.pipeline.driver import quantize_tokens
from ptq.pipeline.solver import BlockSolver
from ptq.pipeline.timing import predict_seconds
from ptq.plan.describe import describe_seconds
from ptq.recipe.reading import resolved_yaml
from ptq.recipe.schema import StatisticsSpec
from ptq.text import duration_text
from tests.ptq.quantizing import executed, make_plan, random_tokens


def test_the_first_block_stands_for_all(tiny_llama, tmp_path, monkeypatch):
    solve, solved = BlockSolver.solve, []

    def counted(self, index):
        solved.append(index)
        return solve(self, index)

    monkeypatch.setattr(BlockSolver, "solve", counted)
    plan = make_plan(tiny_llama, tmp_path / "out")
    seconds = predict_seconds(plan, random_tokens())
    assert solved == [0]
    assert not (tmp_path / "out").exists()
    record = executed(plan).seconds
    assert set(seconds) == set(record) - {"write"}
    assert seconds["total"] == pytest.approx(sum(seconds.values()) / 2)


def test_check_tells_the_time_unless_it_is_not_to(tiny_llama, tmp_path, capsys):
    plan = make_plan(tiny_llama, tmp_path / "out")
    text = tmp_path / "text.txt"  # sooner tokenized than the standard library
    text.write_text("".join(f"line {i} of a text that is long enough\n" for i in range(2000)))
    dataset = plan.recipe.dataset.model_copy(update={"name": str(text)})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(resolved_yaml(plan.recipe.model_copy(update={"dataset": dataset})))
    assert check.main([str(recipe)]) == 0
    found = capsys.readouterr()
    assert "timing the first of 2 blocks (--no-time skips it)" in found.err
    assert "\ntime         about " in found.out
    assert check.main([str(recipe), "--no-time"]) == 0
    again = capsys.readouterr()
    assert "time  " not in again.out
    assert again.err == ""
    assert not (tmp_path / "out").exists()


def test_a_few_steps_of_a_method_stand_for_all(tiny_llama, tmp_path, monkeypatch):
    """Sinks are looked for in one block, and two thousand steps are predicted from three."""
    forward, ran, blocks = torch.optim.Adam.step, [], []

    def counted(self, closure=None):
        ran.append(time.sleep(0.01))
        return forward(self, closure)

    def peaks(stream, sequences, workers, **options):
        blocks.append(options["blocks"])
        return find_peaks(stream, sequences, workers, **options)

    monkeypatch.setattr(torch.optim.Adam, "step", counted)
    monkeypatch.setattr(solver, "find_peaks", peaks)
    methods = (RTNSpec(), RefineSpec(iterations=2000))
    plan = make_plan(tiny_llama, tmp_path / "out", "w4", methods=methods)
    seconds = predict_seconds(plan, random_tokens())
    assert (len(ran), blocks) == (3, [1])
    assert seconds["refine"] > 2 * 2000 * 0.01


def test_the_search_for_sinks_shows_how_far_it_is(tiny_llama, tmp_path, monkeypatch):
    """It runs all blocks before the first is solved: minutes, of a large model."""
    ticks = []

    def bar(**options):
        return nullcontext(SimpleNamespace(update=lambda: ticks.append(options)))

    monkeypatch.setattr(solver, "bar", bar)
    plan = make_plan(tiny_llama, tmp_path / "out")
    quantize_tokens(plan, random_tokens(), progress=True)
    assert [(own["total"], own["shown"]) for own in ticks] == 2 * [(2, True)]


def test_the_longest_phases_are_named():
    seconds = {"a": 1.0, "b": 2.0, "c": 30.0, "d": 0.5, "e": 600.0, "total": 633.5}
    phases = "e 10 min, c 30 s, b 2.0 s, a 1.0 s"
    line = f"time         about 11 min are predicted ({phases}), data and report aside"
    assert describe_seconds(seconds) == line


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_the_backward_pass_is_timed_by_the_first_block(tiny_llama, tmp_path):
    asked = StatisticsSpec(gradients=True)
    plan = make_plan(tiny_llama, tmp_path / "out", statistics=asked)
    assert predict_seconds(plan, random_tokens())["backward"] > 0
    assert not (tmp_path / "out").exists()
