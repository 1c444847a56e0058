"""`ptq completion`: what shells complete, asked of the shells themselves."""

import shutil
import subprocess

import pytest

from formats.command import run_command
from ptq import completion
from ptq.cli import COMMANDS
from ptq.recipe.own_model import shipped_paths

pytest.importorskip("shtab")
# The function that bash calls for a command line, with the words as bash gives them to it.
ASK = """
source "$1"
ask() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shtab_ptq ptq "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[*]}"
}
"""


def script(shell: str, capsys) -> str:
    """What `ptq completion` prints for a shell."""
    assert run_command(completion.main, [shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_paths_and_recipes(tmp_path, capsys):
    bash = shutil.which("bash") or pytest.skip("bash is not here")
    (tmp_path / "ptq.bash").write_text(script("bash", capsys))
    (tmp_path / "folder").mkdir()
    for name in ("mine.yaml", "mine.txt", "mine.gguf"):
        (tmp_path / name).touch()
    w4 = {name for name in shipped_paths() if name.startswith("w4_")}
    answers = {
        "ptq ru": {"run"},
        "ptq ''": set(COMMANDS),
        "ptq run w4_": w4,
        "ptq run peers/": {name for name in shipped_paths() if name.startswith("peers/")},
        "ptq run mi": {"mine.yaml"},
        "ptq run fol": {"folder/"},
        "ptq run w4_gptq --fo": {"--force"},
        "ptq solve folder --recipe w4_": w4,
        "ptq recipes w4_": w4,
        "ptq convert a b --to gptq": {"gptq", "gptq_v2"},
        "ptq inspect ''": {"folder/", "mine.gguf"},
        "ptq inspect folder --json mi": {"mine.yaml", "mine.txt", "mine.gguf"},
        "ptq quantize model --data mi": {"mine.yaml", "mine.txt", "mine.gguf"},
        "ptq diff w4_": w4,
        "ptq predict folder --device cu": {"cuda"},
        "ptq bench --st": {"--steps"},
        "ptq completion ''": {"bash", "zsh", "fish"},
    }
    asked = ASK + "".join(f"ask {line}\n" for line in answers)
    done = subprocess.run(
        [bash, "-c", asked, "bash", str(tmp_path / "ptq.bash")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert not done.stderr
    for line, reply in zip(answers, done.stdout.splitlines(), strict=True):
        assert set(reply.split()) == answers[line], line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_names_commands_and_recipes_and_is_one(shell, tmp_path, capsys):
    text = script(shell, capsys)
    for name in (*COMMANDS, *shipped_paths(), "no-time"):
        assert name in text
    program = shutil.which(shell)
    if program is not None:
        (tmp_path / "script").write_text(text)
        subprocess.run([program, "-n", tmp_path / "script"], check=True)


def test_help_says_how_to_install_it_and_a_shell_must_be_known(capsys):
    with pytest.raises(SystemExit):
        completion.main(["--help"])
    assert "ptq completion zsh > ~/.zfunc/_ptq" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        completion.main(["ksh"])
    assert "invalid choice: 'ksh'" in capsys.readouterr().err
