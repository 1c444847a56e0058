"""A run that is killed goes on where it was and ends with the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.scheme import PRESETS
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.output import RESUME_FOLDER, is_taken, unfinished
from ptq.pipeline import resume, solver
from ptq.pipeline.resume import ResumableRun
from ptq.pipeline.reuse import DECIDING, code_key, deciding_files, key_of, run_facts
from tests.families import but_in_ci
from tests.ptq.quantizing import Stop, executed, files, make_plan, stopped_run
from tests.refusals import refused_checkpoint
from tests.test_import_order import imported_modules

ROOT = Path(__file__).resolve().parents[3]
SOLVES = {
    "a8w8c8": (SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=2), RTNSpec()),
    "w4": (GPTQSpec(), RefineSpec(iterations=3, batch=2)),
}


@pytest.fixture(autouse=True)
def after_every_block(monkeypatch) -> None:
    """States are stored after every block, however little time it took."""
    monkeypatch.setattr(resume, "SHARE", 1e9)


@pytest.fixture(scope="module")
def model(make_model) -> Path:
    return make_model("llama", layers=4)


@pytest.mark.parametrize("scheme", SOLVES)
@pytest.mark.parametrize("stopped_at", but_in_ci([1, 2, 3, 4], 3))
def test_a_stopped_run_goes_on(model, tmp_path, scheme, stopped_at):
    whole = make_plan(model, tmp_path / "whole", scheme, methods=SOLVES[scheme])
    expected = executed(whole)
    plan = make_plan(model, tmp_path / "out", scheme, methods=SOLVES[scheme])
    with stopped_run(stopped_at):
        executed(plan)
    assert unfinished(tmp_path / "out")
    assert not is_taken(tmp_path / "out")
    states = list((tmp_path / "out" / RESUME_FOLDER).glob("states-*"))
    assert 1 <= len(states) <= 2
    found = executed(plan)
    assert found.resumed_blocks == stopped_at
    assert files(found.checkpoint) == files(expected.checkpoint)
    for name in ("statistics.safetensors", "found.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (found.modules, found.smoothing, found.events) == (
        expected.modules,
        expected.smoothing,
        expected.events,
    )
    assert not unfinished(tmp_path / "out")
    assert is_taken(tmp_path / "out")


def test_states_are_left_out_where_they_take_too_long(model, tmp_path, monkeypatch):
    """A run then goes on after the last block that has them."""
    monkeypatch.setattr(resume, "SHARE", 1e-9)
    scheme, output = "w4", tmp_path / "out"
    plan = make_plan(model, output, scheme, methods=SOLVES[scheme])
    save, saved = ResumableRun.save, []

    def save_and_stop(self, *arguments):
        save(self, *arguments)
        self.wait()
        saved.append(self.done)
        if len(saved) == 3:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(ResumableRun, "save", save_and_stop)
        with pytest.raises(Stop):
            executed(plan)
    assert saved == [1, 1, 1]
    found = executed(plan)
    assert found.resumed_blocks == 1
    whole = make_plan(model, tmp_path / "whole", scheme, methods=SOLVES[scheme])
    expected = executed(whole)
    assert files(found.checkpoint) == files(expected.checkpoint)


def test_what_has_no_states_is_counted_whenever_it_ends(tmp_path, monkeypatch):
    """As a head: nothing comes after it, so that nothing is saved by leaving it out."""
    monkeypatch.setattr(resume, "SHARE", 1e-9)
    run, done = ResumableRun(tmp_path, "key", 3), []
    for states in ([torch.ones(2, 4)], [torch.ones(2, 4)], []):
        run.save(resume.SolvedBlock(), states, None)
        run.wait()
        done.append(run.done)
    run.close()
    assert done == [1, 1, 3]
    assert ResumableRun(tmp_path, "key", 3).done == 3


def test_the_order_of_tensors_is_kept(tmp_path):
    """It decides on which shard a tensor goes to."""
    names = ["z.weight", "a.scale", "m.bias", "a.weight"]
    tensors = {name: torch.full((3,), i, dtype=torch.int8) for i, name in enumerate(names)}
    tensors["a.scale"] = torch.ones(2)
    run = ResumableRun(tmp_path, "key")
    run.save(resume.SolvedBlock(tensors=tensors), [torch.ones(2, 4)], None)
    run.close()
    found = run.block(0).tensors
    assert list(found) == names
    assert all(torch.equal(found[name], tensors[name]) for name in names)


@pytest.mark.parametrize("placed", [True, False])
def test_an_interrupt_while_a_block_is_counted_loses_nothing(tmp_path, monkeypatch, placed):
    """Whether it came before or after the count was in its place, `done` is what the disk holds."""
    run = ResumableRun(tmp_path, "key")
    real = resume.replace_file

    def interrupted(path: Path, data: bytes) -> None:
        counts = path.name == resume.PROGRESS_FILE
        if placed or not counts:
            real(path, data)
        if counts:
            raise KeyboardInterrupt

    monkeypatch.setattr(resume, "replace_file", interrupted)
    run.save(resume.SolvedBlock(), [torch.ones(2, 4)], None)
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert run.done == ResumableRun(tmp_path, "key").done == placed


def test_code_that_decides_nothing_may_change(tmp_path):
    for part in (*DECIDING, "ptq/report", "ptq/commands", "inference"):
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    key = code_key(tmp_path)
    assert key == code_key()
    for name in ("ptq/report/html.py", "ptq/commands/run.py", "ptq/pipeline/live.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed")
    assert code_key(tmp_path) == key
    for name in ("ptq/methods/gptq.py", "ptq/pipeline/emit.py", "kernels/numerics.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed")
        assert code_key(tmp_path) != key
        key = code_key(tmp_path)


def test_all_code_that_decides_is_counted():
    """What it imports is counted too, but for what the key holds as data, and what only checks or tells."""
    data = {"ptq.recipe.schema", "ptq.recipe.reading", "ptq.plan.plan", "ptq.plan.machine"}
    telling = {"ptq.output", "ptq.pipeline.live", "ptq.plan.preflight", "ptq.result", "ptq.text"}
    counted = set(deciding_files())
    for path in (path for path in counted if path.suffix == ".py"):
        for name in imported_modules(path) - data - telling:
            file = ROOT / f"{name.replace('.', '/')}.py"
            assert file in counted or not file.is_file(), f"{path} imports {name}"


def test_another_run_starts_over(model, tmp_path):
    checkpoint, output = Checkpoint.open(model), tmp_path / "out"
    plan = make_plan(model, output)
    key = key_of(run_facts(plan, checkpoint, "f"))
    assert key == key_of(run_facts(make_plan(model, tmp_path / "elsewhere"), checkpoint, "f"))
    others = {
        key_of(run_facts(plan, checkpoint, "other tokens")),
        key_of(run_facts(make_plan(model, output, "a8w8"), checkpoint, "f")),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        others.add(key_of(run_facts(plan, checkpoint, "f")))
    finally:
        torch.set_num_threads(threads)
    assert len(others | {key}) == 4
    ResumableRun(output, key)._progress(3)
    assert ResumableRun(output, key).done == 3
    (output / RESUME_FOLDER / "block-00000.json").write_text("of the first run")
    assert ResumableRun(output, "another").done == 0
    assert not (output / RESUME_FOLDER / "block-00000.json").exists()


@pytest.mark.parametrize("left", [(), ("block-00000.json", "states-00000.safetensors")])
def test_a_run_killed_before_it_stored_anything_leaves_the_output_free(model, tmp_path, left):
    """Nor does one that was killed while it removed what it had stored."""
    output = tmp_path / "out"
    (output / RESUME_FOLDER).mkdir(parents=True)
    for name in left:
        (output / RESUME_FOLDER / name).write_text("of a run that is gone")
    assert not unfinished(output)
    assert not is_taken(output)
    assert executed(make_plan(model, output)).resumed_blocks == 0
    assert not (output / RESUME_FOLDER).exists()
    assert is_taken(output)


def test_damaged_leftovers_are_named(model, tmp_path):
    run = ResumableRun(tmp_path, "key")
    run._progress(1)
    refused_checkpoint("damaged", run.block, 0)
    refused_checkpoint("damaged", run.states)


def test_an_error_of_the_recipe_leaves_nothing_to_go_on_with(model, tmp_path, monkeypatch):
    plan = make_plan(model, tmp_path / "out", methods=(RTNSpec(),))
    monkeypatch.setattr(solver, "module_rows", lambda *_: (_ for _ in ()).throw(RecipeError("x")))
    with pytest.raises(RecipeError):
        executed(plan)
    assert not (tmp_path / "out").exists()


SERVER = """
import os
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import ptq
import torch
torch.set_num_threads(1)
from tests.ptq.quantizing import make_plan, random_tokens
from tests.test_import_order import imported_modules
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.pipeline import resume, solver
from ptq.pipeline.driver import quantize_tokens
resume.SHARE = 1e9
methods = (GPTQSpec(), RefineSpec(iterations=3, batch=2))
tokens = random_tokens()
for line in sys.stdin:
    model, output = line.split()
    child = os.fork()
    if not child:
        quantize_tokens(make_plan(Path(model), Path(output), "w4", methods=methods), tokens, progress=False)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Runs:
    """Runs of one recipe in processes of their own, forked from one that has imported everything."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def run(self, output: Path, kill_after: float | None = None) -> int:
        """Exit code of a run, which is killed after so many seconds if it has not ended."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(self._model, output, file=self._server.stdin, flush=True)
        child = int(self._server.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture
def runs(model):
    server = Runs(model)
    yield server
    server.close()


@pytest.mark.parametrize("times", [20 if os.environ.get("CI") == "true" else 4])
def test_kill_9_at_random_moments(runs, tmp_path, times):
    """Whatever the moment, the same command ends with the bytes of a run that was left alone."""
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert runs.run(whole) == 0  # the first one is slower
    shutil.rmtree(whole)
    begin = time.perf_counter()
    assert runs.run(whole) == 0
    seconds = time.perf_counter() - begin
    expected, moments = files(whole), random.Random(0)
    kills = hits = 0
    while kills < times:
        begin, fresh = time.perf_counter(), not output.exists()
        code = runs.run(output, kill_after=moments.uniform(0.0, seconds))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if code == 0 and fresh:  # faster than the first one: later kills are to hit runs at work
            seconds = min(seconds, time.perf_counter() - begin)
        hits += code != 0 and not is_taken(output)
        if code == 0 or is_taken(output):  # it ended, or was killed after its end
            assert differing(output, expected) == []
            shutil.rmtree(output)
    assert runs.run(output) == 0
    assert differing(output, expected) == []
    assert hits >= times // 4  # that many at least hit a run at work
    assert PRESETS["w4"] == Checkpoint.open(output / "checkpoint", verify=True).scheme


def differing(output: Path, expected: dict[str, bytes]) -> list[str]:
    """Files of a finished output that are not as expected; those that tell times may differ.

    A kill while what is no longer needed is removed leaves some of it; the next run removes it.
    """
    found = {
        name: data for name, data in files(output).items() if not name.startswith(RESUME_FOLDER)
    }
    timed = {"quantization.json", "recipe.yaml"}
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in (timed & found.keys()) and found.get(name) != expected.get(name)
    ]
