"""The `ptq` command dispatches, stays light, and refuses another project's packages."""

import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from formats.errors import EngineError
from formats.namespace import require_own_packages
from ptq import cli
from ptq.commands import compare, convert, run

ROOT = Path(__file__).resolve().parents[3]
DOORS = ("ptq.run", "ptq.check", "ptq.inspect", "ptq.report", "inference.predict")


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ptq 0.")
    assert cli.main([]) == 2
    assert "usage: ptq" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "meant"), [("rnu", "run"), ("inspct", "inspect")])
def test_an_unknown_command_gets_a_guess(found, meant, capsys):
    assert cli.main([found]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: no command {found!r}; did you mean {meant!r}? allowed: run, ")


@pytest.mark.parametrize(
    "words",
    [
        "predict ./no/such --prompt hi",
        "chat ./no/such",
        "serve ./no/such",
        "eval ./no/such --tasks local",
        "eval recipes/tiny-python --against ./no/such --tasks local",
        "certify ./no/such",
        "certify recipes/tiny-python --against ./no/such",
        "inspect ./no/such",
        "convert ./no/such out --to gptq",
        "bench ./no/such",
        "bench recipes/tiny-python --against ./no/such",
        "quantize ./no/such --scheme a8w8",
    ],
)
def test_every_command_knows_a_path_from_a_name_on_the_hub(words, capsys):
    assert cli.main(words.split()) == 2
    assert "/no/such: no such folder; give the folder" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--output=~/out"], ["--output", "~/out"]])
def test_a_path_in_the_home_folder(given, monkeypatch):
    """Shells leave `--output=~/out` as it is typed."""
    monkeypatch.setenv("HOME", "/somewhere")
    assert run.parser().parse_args(["~/r.yaml", *given]).output == Path("/somewhere/out")
    assert convert.parser().parse_args(["a", "~/b"]).out == Path("/somewhere/b")
    assert compare.parser().parse_args(["a", "~/b"]).outputs == [Path("a"), Path("/somewhere/b")]


@pytest.mark.parametrize(
    "words",
    [
        "inspect ~no-such-user/x",
        "check w8_rtn --set model.path=~no-such-user/x",
        "quantize recipes/tiny-python --scheme w8 --data ~no-such-user/x",
        "predict recipes/tiny-python --prompt a --adapter a=~no-such-user/x",
    ],
)
def test_the_home_of_a_user_that_is_not_here_is_no_such_path(words, capsys):
    assert cli.main(words.split()) == 2
    assert "~no-such-user/x" in capsys.readouterr().err


def test_arguments_and_exit_code_pass_through(monkeypatch):
    given = []
    module = ModuleType("ptq.commands.run")
    module.main = lambda argv: given.append(argv) or 1  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "ptq.commands.run", module)
    assert cli.main(["run", "r.yaml", "--force"]) == 1
    assert given == [["r.yaml", "--force"]]


def test_help_imports_nothing_heavy_and_is_fast():
    code = (
        "import sys; from ptq.cli import main; main(['--help']);"
        "print(sorted({'torch', 'transformers', 'pandas', 'pydantic'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert seconds < 2  # of the processor; 0.1 s on an idle machine


def test_another_package_of_the_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "inference"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match=r"another project's package") as caught:
        require_own_packages("calibrate", "inference")
    assert str(tmp_path / "inference") in str(caught.value)
    assert "pip uninstall inference" in str(caught.value)


def test_a_character_that_the_terminal_lacks_is_no_defect():
    """An answer of a model, or the dash of a table, where the locale is no UTF-8."""
    script = "from formats.command import run_command; run_command(lambda _: print('a \u2013 b'))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.split() == [b"a", b"?", b"b"]


def test_a_missing_package_is_told():
    with pytest.raises(EngineError, match="'no_such_room' is missing"):
        require_own_packages("no_such_room")


@pytest.mark.parametrize("module", sorted({module for module, _ in cli.COMMANDS.values()}))
def test_every_command_has_a_main(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert "def main(" in Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", ["ptq", *DOORS, "inference.bench"])
def test_what_runs_as_python_m(module):
    folder = ROOT.joinpath(*module.split("."))
    file = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")
