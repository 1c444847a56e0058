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

from formats.command import CommandParser, count
from formats.errors import RequestError
from formats.files import replace_file
from formats.gguf.locate import is_gguf, locate_model
from formats.hub import model_argument
from formats.namespace import later

with later():
    from formats.checkpoint import read
    from ptq.certify import certificate
    from ptq.report import inspection


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq inspect`."""
    made = CommandParser(
        prog="ptq inspect", description="Show a checkpoint's scales, outlier channels and sizes."
    )
    about = "folder of a quantized or float model, or a .gguf file"
    made.add_argument("checkpoint", type=model_argument, help=about)
    made.add_argument(
        "--module",
        metavar="PATTERN",
        help="only modules whose name contains this, or matches it where it has * or ?",
    )
    made.add_argument("--top", type=count, default=10, metavar="N", help="outliers to list")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything here, too")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the scale table here, too")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a checkpoint holds; 0 on success."""
    arguments = parser().parse_args(argv)
    folder = locate_model(arguments.checkpoint)
    found = inspection.inspect(read.Checkpoint.open(folder), arguments.module)
    if is_gguf(arguments.checkpoint):  # others open the file, whatever they say of its folder here
        found = found.model_copy(update={"only_here": None})
    if arguments.csv is not None and not found.scales:
        raise RequestError("--csv: the checkpoint has no scales, there is no table to write")
    print("\n".join(inspection.describe(found, arguments.top)))
    if certified := certificate.describe(folder):
        print(f"\n{certified}")
    if arguments.json is not None:
        text = json.dumps(found.model_dump(mode="json"), indent=1)
        replace_file(arguments.json, f"{text}\n".encode())
    if arguments.csv is not None:
        replace_file(arguments.csv, inspection.to_csv(found).encode())
    return 0
