"""`ptq families`: which models are calibrated, quantized and run here, and by what.

    ptq families [MODEL_TYPE] [--json]

MODEL_TYPE is that of a model's config.json; without one, the declared families are listed. A causal
language model that is not among them may run by transformers' own code: `ptq check` tells.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from formats.command import CommandParser
from formats.families.registry import COLUMNS, DOCUMENT, read_table
from ptq.text import typed_path


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq families`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq families", description=summary)
    made.add_argument("family", nargs="?", metavar="MODEL_TYPE", help="this one alone")
    made.add_argument("--json", action="store_true", help="the rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or the row of one type."""
    arguments = parser().parse_args(argv)
    rows, wanted = read_table(), arguments.family
    declared = wanted is None or wanted in [row["family"] for row in rows]
    if wanted is not None:
        rows = [row for row in rows if row["family"] == wanted] or [rows[-1] | {"family": wanted}]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    print("\n".join(_lines([dict(zip(COLUMNS, COLUMNS, strict=True)), *rows])))
    if not declared:
        print(f"\nNo family of the name {wanted} is declared: this holds if transformers knows it")
        print("as a causal language model whose attention goes through its attention interface.")
    print(f"\n{typed_path(DOCUMENT)} tells what the columns mean.")
    return 0


def _lines(rows: Sequence[dict[str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in COLUMNS]
    cells = (
        [row[c].ljust(width) for c, width in zip(COLUMNS, widths, strict=True)] for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]
