"""`ptq inspect`: a checkpoint's scheme, sizes, scales and outlier channels.

    ptq inspect CHECKPOINT [--module PATTERN] [--top N] [--json FILE] [--csv FILE]

Works on quantized and on float checkpoints. Outlier channels are those of the weights and, where
the statistics of a run lie beside the checkpoint, those of the inputs and of the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from formats.checkpoint.read import Checkpoint
from formats.errors import RequestError
from formats.files import replace_file
from ptq.report.inspection import describe, inspect, to_csv


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a checkpoint holds; 0 on success."""
    parser = argparse.ArgumentParser(
        prog="ptq inspect", description="Show a checkpoint's scales, outlier channels and sizes."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a quantized or float model")
    parser.add_argument(
        "--module",
        metavar="PATTERN",
        help="only modules whose name contains this, or matches it where it has * or ?",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="outliers to list")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here, too")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the scale table here, too")
    arguments = parser.parse_args(argv)
    if arguments.top < 1:
        parser.error("--top must be at least 1")
    found = inspect(Checkpoint.open(arguments.checkpoint), arguments.module)
    if arguments.csv is not None and not found.scales:
        raise RequestError("--csv: the checkpoint has no scales, there is no table to write")
    print("\n".join(describe(found, arguments.top)))
    if arguments.json is not None:
        text = json.dumps(found.model_dump(mode="json"), indent=1)
        replace_file(arguments.json, f"{text}\n".encode())
    if arguments.csv is not None:
        replace_file(arguments.csv, to_csv(found).encode())
    return 0
