"""`ptq completion`: a script that has a shell complete commands, options, paths and recipes' names.

    ptq completion bash|zsh|fish

Nothing of ptq runs while a line is completed. Make the script again after an update.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats.command import CommandParser, device
from formats.hub import model_argument
from formats.namespace import later
from ptq.cli import COMMANDS
from ptq.recipe.own_model import shipped_paths

with later():
    import shtab

INSTALL = """\
How to install it for yourself:

  bash   mkdir -p ~/.local/share/bash-completion/completions &&
         ptq completion bash > ~/.local/share/bash-completion/completions/ptq
         (or, without the package bash-completion: ptq completion bash >> ~/.bashrc)
  zsh    mkdir -p ~/.zfunc && ptq completion zsh > ~/.zfunc/_ptq, and in ~/.zshrc before
         compinit: fpath+=~/.zfunc
  fish   ptq completion fish > ~/.config/fish/completions/ptq.fish

The next shell that you open has it. Make it again after an update of ptq.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq completion`."""
    made = CommandParser(
        prog="ptq completion",
        description="Print a script that has a shell complete ptq's commands, options, paths and "
        "the names\nof the recipes that come with it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=INSTALL,
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that reads it")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell."""
    arguments = parser().parse_args(argv)
    print(shtab.complete(_all_commands(), shell=arguments.shell))
    return 0


def _all_commands() -> argparse.ArgumentParser:
    """One parser of all commands, each argument with what it is completed by."""
    top = argparse.ArgumentParser(prog="ptq")
    top.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = top.add_subparsers()
    recipes = _named_or_files("recipes", list(shipped_paths()), ".y*ml")
    models = _named_or_files("models", [], ".gguf")
    for name, (module, text) in COMMANDS.items():
        own: argparse.ArgumentParser = importlib.import_module(module).parser()
        for action in own._actions:
            if action.type is device:
                action.choices = ("cpu", "cuda")
            how = _completed_by(action, recipes, models)
            if how is not None:
                vars(action)["complete"] = how
        commands.add_parser(name, help=text, parents=[own], add_help=False)
    return top


def _completed_by(
    action: argparse.Action, recipes: dict[str, Any], models: dict[str, Any]
) -> dict[str, Any] | None:
    """Recipes, models, folders or files, as an argument's name, help and type tell, or nothing."""
    text = action.help or ""
    if action.dest == "recipe" or text.startswith("recipe"):
        return recipes
    if action.metavar == "DIR" or ("folder" in text and "file" not in text):
        return shtab.DIRECTORY
    if action.type is model_argument:
        return models
    return shtab.FILE if action.type is Path or "folder" in text else None


def _named_or_files(kind: str, names: Sequence[str], ending: str) -> dict[str, Any]:
    """Names, files of an ending, and folders on the way to some, in the words of each shell."""
    words = shlex.quote(" ".join(names))
    usual = ending.replace("*", "a")  # fish takes no pattern
    return {
        "bash": f"_ptq_{kind}",
        "zsh": f"_ptq_{kind}",
        "fish": f"{shlex.join(names)} (__fish_complete_suffix {usual})",
        "preamble": {
            "bash": f"""
_ptq_{kind}() {{
  compgen -W {words} -- "$1"
  compgen -f -X '!*{ending}' -- "$1"
  compgen -d -S / -- "$1"
}}""",
            "zsh": f"""
_ptq_{kind}() {{
  compadd -- {shlex.join(names)}
  _files -g '*{ending}'
}}""",
        },
    }
