"""The `ptq` command dispatches, stays light, and refuses another project's packages."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from formats.errors import EngineError
from ptq import cli
from ptq.rooms import ROOT, require_own


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
    assert error.startswith(f"error: no command {found!r}; did you mean {meant!r}? commands: run, ")


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
        require_own("calibrate", "inference")
    assert str(tmp_path / "inference") in str(caught.value)
    assert "pip uninstall inference" in str(caught.value)


def test_a_missing_package_is_told():
    with pytest.raises(EngineError, match="'no_such_room' is missing"):
        require_own("no_such_room")


@pytest.mark.parametrize("module", sorted({module for module, _ in cli.COMMANDS.values()}))
def test_every_command_is_also_python_m(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert 'if __name__ == "__main__":' in source
    assert "def main(" in source
