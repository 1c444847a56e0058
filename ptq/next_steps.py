"""Commands for a person to paste next, and paths as that person would type them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def typed_path(path: Path) -> str:
    """A path from the current directory where it lies below it; otherwise absolute."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def next_commands(checkpoint: Path) -> list[str]:
    """What can be done with a checkpoint, quoted for a shell in the current directory."""
    folder = typed_path(checkpoint)
    return [
        shlex.join(["ptq", "predict", folder, "--prompt", "def add(a, b):"]),
        shlex.join(["ptq", "inspect", folder]),
        shlex.join(["ptq", "bench", folder]),
    ]


def forced_command(recipe: Path, overrides: Sequence[str], output: Path | None) -> str:
    """The same run with --force, quoted for a shell."""
    words = ["ptq", "run", str(recipe)]
    for override in overrides:
        words += ["--set", override]
    words += ["--output", str(output)] if output is not None else []
    return shlex.join([*words, "--force"])
