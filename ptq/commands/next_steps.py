"""Commands for a person to paste next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from formats.chat_template import brings_chat_template
from formats.namespace import later
from ptq.text import typed_path

with later():
    from formats.checkpoint import native


def next_commands(checkpoint: Path) -> list[str]:
    """What can be done with a checkpoint, quoted for a shell in the current directory."""
    folder = typed_path(checkpoint)
    commands = [
        ["predict", folder, "--prompt", "def add(a, b):"],
        ["inspect", folder],
        ["bench", folder],
        *([["chat", folder]] if brings_chat_template(checkpoint) else []),
        ["serve", folder],
    ]
    return [shlex.join(["ptq", *words]) for words in commands]


def checkpoint_lines(checkpoint: Path) -> list[str]:
    """Where a checkpoint is, and, where it is so, that no other software opens it."""
    reason = native.said_in_card(checkpoint)
    return [f"checkpoint: {typed_path(checkpoint)}", *([f"note: {reason}"] if reason else [])]


def forced_command(recipe: Path, overrides: Sequence[str], output: Path | None) -> str:
    """The same run with --force, quoted for a shell."""
    words = ["ptq", "run", str(recipe)]
    for override in overrides:
        words += ["--set", override]
    words += ["--output", str(output)] if output is not None else []
    return shlex.join([*words, "--force"])
