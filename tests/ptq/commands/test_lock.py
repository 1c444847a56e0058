"""A second command on an output folder at work is refused at once, whichever command it is."""

import pytest

import ptq
from formats.command import run_command
from formats.files import output_locked
from ptq.commands import convert, peers, report, run, solve
from tests.ptq.quantizing import make_plan, write_recipe
from tests.refusals import refused_checkpoint


@pytest.fixture
def busy(tmp_path, monkeypatch, tiny_llama):
    """A current folder with a recipe whose output another run works in."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, tiny_llama, dataset={})
    resume = tmp_path / "out" / ".resume"
    resume.mkdir(parents=True)
    (resume / "progress.json").write_text("of the run at work")
    (tmp_path / "out" / "quantization.json").touch()  # of a run before, which is replaced
    with output_locked(tmp_path / "out"):
        yield tmp_path
    assert (resume / "progress.json").read_text() == "of the run at work"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (run, ["r.yaml"]),
        (run, ["r.yaml", "--force", "--set", "scheme=a8w8"]),
        (report, ["out"]),
        (peers, ["r.yaml", "--set", "report.peers=[bitsandbytes-nf4]"]),
        (convert, ["model", "out", "--to", "gptq", "--force"]),
    ],
)
def test_it_is_refused(busy, make_quantized, tiny_llama, capsys, command, arguments):
    source = str(make_quantized(tiny_llama, "w4"))
    words = [source if word == "model" else word for word in arguments]
    assert run_command(command.main, words) == 2
    told = capsys.readouterr().err
    assert "out: another process works there" in told
    assert "It is process " in told


def test_solving_is_refused_in_it_and_from_it(busy, tiny_llama, capsys):
    (busy / "run").mkdir()
    recipe = busy / "run" / "recipe.yaml"
    recipe.write_text((busy / "r.yaml").read_text())
    (busy / "run" / "quantization.json").touch()
    assert run_command(solve.main, ["run", "--output", "out"]) == 2
    assert "out: another process works there" in capsys.readouterr().err
    recipe.rename(busy / "out" / "recipe.yaml")
    assert run_command(solve.main, ["out", "--output", "other"]) == 2
    assert "out: another process works there" in capsys.readouterr().err
    assert not (busy / "other").exists()


def test_the_python_door_is_shut_too(busy, tiny_llama):
    refused_checkpoint("another process works there", ptq.quantize, "r.yaml", force=True)
    recipe = make_plan(tiny_llama, busy / "out").recipe
    refused_checkpoint("another process works there", ptq.quantize, recipe)
