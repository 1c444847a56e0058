"""`ptq diff`: what differs between two recipes, or between two checkpoints.

    ptq diff A.yaml B.yaml
    ptq diff CHECKPOINT_A CHECKPOINT_B [--top N]

Recipes are compared as they resolve, with bases, presets and defaults spelled out. Checkpoints are
compared by scheme, by the tensors that they hold, and by their scales. Exit code 0 where nothing
differs, 1 where something does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.command import count
from formats.errors import RequestError
from formats.later import later

if TYPE_CHECKING:
    from formats.checkpoint import read
    from ptq.report import differences
else:
    differences = later("ptq.report.differences")
    read = later("formats.checkpoint.read")


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq diff`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = argparse.ArgumentParser(prog="ptq diff", description=summary)
    made.add_argument("a", type=Path)
    made.add_argument("b", type=Path)
    made.add_argument("--top", type=count, default=10, help="tensors listed of each kind")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; 0 where nothing does, 1 where something does."""
    arguments = parser().parse_args(argv)
    folders = [path.is_dir() for path in (arguments.a, arguments.b)]
    if any(folders) != all(folders):
        raise RequestError(
            f"{arguments.a} and {arguments.b}: one is a folder and one is not. Give two recipes, "
            "or the folders of two checkpoints"
        )
    if all(folders):
        a, b = (read.Checkpoint.open(path) for path in (arguments.a, arguments.b))
        lines = differences.diff_checkpoints(a, b, arguments.top)
    else:
        lines = differences.diff_recipes(arguments.a, arguments.b)
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0
