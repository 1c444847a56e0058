"""`ptq run` and `ptq check`: order of work, exit codes, what is printed and what is refused."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from formats.command import run_command
from formats.errors import RecipeError
from inference.server import command
from ptq.commands import check, run
from ptq.commands.shared import next_commands
from ptq.plan.describe import _ranges
from ptq.recipe.reading import load_recipe
from ptq.text import typed_path
from tests.ptq.quantizing import write_recipe


@dataclass
class Result:
    checkpoint: Path


@dataclass
class Report:
    passed: bool
    failures: tuple[str, ...]
    folder: Path
    summary_rows: tuple[tuple[str, ...], ...] = (
        ("", "original", "quantized"),
        ("size", "14.7 MB", "8.5 MB"),
        ("perplexity", "9.1", "10.25"),
    )
    line: str = "Green: every threshold holds."

    @property
    def change_first(self) -> str:
        return "" if self.passed else "ptq run other --output other"


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_llama) -> Path:
    """A current directory with a recipe of the tiny model."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, tiny_llama, scheme="a8w8c8", output={"path": "out dir"})
    return tmp_path


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Replaces quantization and report by ones that only say that they were called."""
    made: list[str] = []

    def quantize_tokens(plan, tokens, *, force, progress, keep, watch):
        assert keep
        assert tokens.split == "calibration"
        assert "data" in watch.seconds()
        made.append(f"quantize force={force}")
        folder = plan.recipe.output.path / "checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        return Result(folder)

    def make_report(result, plan, evaluation, *, progress, ordered=None):
        assert ordered is None
        assert evaluation.split == "evaluation"
        made.append("report")
        folder = plan.recipe.output.path / "report"
        assert not folder.exists()
        folder.mkdir()
        kl = plan.recipe.report.thresholds.kl
        return Report(kl is None, () if kl is None else (f"kl 0.5 is above {kl}",), folder)

    monkeypatch.setattr("ptq.pipeline.driver.quantize_tokens", quantize_tokens)
    monkeypatch.setattr("ptq.report.report.make_report", make_report)
    return made


def test_a_run_ends_with_table_paths_and_commands(here, calls, capsys):
    assert run.main(["r.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert calls == ["quantize force=False", "report"]
    assert "text.py: one document: its first half calibrates" in lines[0]
    assert lines[2:6] == [
        "            original  quantized",
        "-------------------------------",
        "size         14.7 MB     8.5 MB",
        "perplexity       9.1      10.25",
    ]
    assert "verdict:    Green: every threshold holds." in lines
    assert "checkpoint: out dir/checkpoint" in lines
    assert "report:     out dir/report/report.html" in lines
    commands = [shlex.split(line) for line in lines if line.startswith("  ptq ")]
    assert [words[1] for words in commands] == ["predict", "inspect", "bench", "serve"]
    assert all(words[2] == "out dir/checkpoint" for words in commands)
    assert commands[0][3:] == ["--prompt", "def add(a, b):"]


def test_missed_thresholds_give_exit_code_1(here, calls, capsys):
    assert run.main(["r.yaml", "--set", "report.thresholds.kl=0.1"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: kl 0.5 is above 0.1" in out
    assert "Next:\n  ptq run other --output other\n  ptq predict " in out


def test_errors_give_exit_code_2_and_no_trace(here, calls, capsys):
    assert run_command(run.main, ["r.yaml", "--set", "scheme=a9"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --set scheme=a9: unknown scheme 'a9'")
    assert "Traceback" not in error
    assert calls == []


def test_an_existing_output_is_refused_with_the_command_that_replaces_it(here, calls, capsys):
    assert run.main(["r.yaml", "--set", "dataset.calibration.seed=1"]) == 0
    with pytest.raises(RecipeError, match="out dir exists already") as caught:
        run.main(["r.yaml", "--set", "dataset.calibration.seed=1"])
    assert calls == ["quantize force=False", "report"]
    (line,) = (line for line in str(caught.value).splitlines() if line.startswith("  ptq run"))
    assert line == "  ptq run r.yaml --set dataset.calibration.seed=1 --force"
    assert run.main(shlex.split(line)[2:]) == 0
    assert calls[2:] == ["quantize force=True", "report"]


def test_no_command_is_printed_that_would_replace_the_model(here, calls, tiny_llama):
    with pytest.raises(RecipeError, match="holds the model itself; give another --output"):
        run.main(["r.yaml", "--output", str(tiny_llama)])
    assert calls == []


@pytest.mark.parametrize("name", ["elsewhere", "a: b", "1"])
def test_output_may_be_given_on_the_command_line(name, here, calls):
    assert run.main(["r.yaml", "--output", name]) == 0
    assert (here / name / "checkpoint").is_dir()
    with pytest.raises(RecipeError, match="exists already") as caught:
        run.main(["r.yaml", "--output", name])
    assert shlex.join(["ptq", "run", "r.yaml", "--output", name, "--force"]) in str(caught.value)


def test_faults_of_evaluation_data_show_before_any_work(here, calls):
    with pytest.raises(RecipeError, match="evaluation"):
        run.main(["r.yaml", "--set", "dataset.evaluation.samples=10000000"])
    assert calls == []


def test_check_shows_the_plan_and_writes_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    assert check.main(["r.yaml"]) == 0
    out = capsys.readouterr().out
    assert sorted(here.rglob("*")) == before
    down = next(line for line in out.splitlines() if "mlp.down_proj" in line)
    assert (
        down.split()
        == (
            "model.layers.*.mlp.down_proj 128x256 blocks 0-1 quantize "
            "int8 weights per_channel, static int8 inputs per_tensor"
        ).split()
    )
    assert "K and V of 2 blocks: int8 per_head, static" in out
    assert "text.py: 2 sequences, 64 tokens, fingerprint " in out
    assert "predicted    checkpoint " in out


def test_check_tells_blocks_apart_that_are_treated_differently(here, capsys):
    assert check.main(["r.yaml", "--set", "ignore=['re:.*1.mlp.down_proj']"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "down_proj" in line]
    assert [row[2:5] for row in rows] == [["blocks", "0", "quantize"], ["blocks", "1", "float"]]


def test_check_notes_an_output_that_exists(here, capsys):
    (here / "out dir").mkdir()
    (here / "out dir" / "x").touch()
    assert check.main(["r.yaml"]) == 0
    assert "(exists: run with --force)" in capsys.readouterr().out
    assert check.main(["r.yaml", "--output", "mine"]) == 0
    out = capsys.readouterr().out
    assert f"output       {here / 'mine'}\n" in out


def test_check_refuses_what_run_would_refuse(here, capsys):
    assert run_command(check.main, ["r.yaml", "--set", "ignore=[nothing]"]) == 2
    assert "matches no linear layer" in capsys.readouterr().err


def test_paths_are_shown_as_they_would_be_typed(here):
    assert typed_path(here / "a" / "b") == "a/b"
    assert typed_path(Path("/elsewhere/x")) == "/elsewhere/x"
    assert shlex.split(next_commands(here / "it's here")[1]) == ["ptq", "inspect", "it's here"]


def test_a_model_that_chats_may_be_talked_with_next(here):
    def names() -> list[str]:
        return [shlex.split(line)[1] for line in next_commands(here / "model")]

    assert names() == ["predict", "inspect", "bench", "serve"]
    (here / "model").mkdir()
    (here / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert names() == ["predict", "inspect", "bench", "chat", "serve"]


def test_what_a_server_lacks_is_installed_before_it(here, monkeypatch):
    monkeypatch.setattr(command, "NEEDED", ("fastapi", "no_such_library"))
    assert next_commands(here / "model")[-2:] == ["pip install 'ptq[serve]'", "ptq serve model"]


def test_ranges_of_blocks():
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_recipe_of_these_tests_is_valid(here):
    assert load_recipe("r.yaml").report.speed is None


@pytest.mark.parametrize("command", [check, run])
def test_a_gpu_that_is_not_here_is_refused_before_any_work(command, here, calls, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"^--set device=cuda: found 'cuda', but torch"):
        command.main(["r.yaml", "--set", "device=cuda"])
    assert calls == []
