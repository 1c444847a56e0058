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

from formats.checkpoint.read import Checkpoint
from formats.errors import RequestError
from ptq.report.differences import diff_checkpoints, diff_recipes


def main(argv: Sequence[str] | None = None) -> int:
    """Print what differs; 0 where nothing does, 1 where something does."""
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="ptq diff", description=summary)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--top", type=int, default=10, help="tensors listed of each kind")
    arguments = parser.parse_args(argv)
    folders = [path.is_dir() for path in (arguments.a, arguments.b)]
    if any(folders) != all(folders):
        raise RequestError(
            f"{arguments.a} and {arguments.b}: one is a folder and one is not. Give two recipes, "
            "or the folders of two checkpoints"
        )
    if all(folders):
        a, b = (Checkpoint.open(path) for path in (arguments.a, arguments.b))
        lines = diff_checkpoints(a, b, arguments.top)
    else:
        lines = diff_recipes(arguments.a, arguments.b)
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0
