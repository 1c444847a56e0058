"""`ptq compare`: the reports of several runs side by side, as one table and one plot.

    ptq compare OUTPUT [OUTPUT ...] [--markdown FILE] [--plot FILE.svg]

Each OUTPUT is the output directory of a finished run, or of `ptq peers`; peers that either of them
measured are rows as well. Runs that were not compared with the same original on the same tokens are
refused: their figures do not belong in one table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.files import replace_file
from formats.namespace import later
from ptq.output import PEERS_FILE, REPORT_FOLDER, require_run

with later():
    from ptq.report import comparison


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq compare`."""
    summary = (__doc__ or "").split("\n\n")[0]
    made = CommandParser(prog="ptq compare", description=summary)
    made.add_argument(
        "outputs", nargs="+", type=Path, metavar="OUTPUT", help="output folder of a finished run"
    )
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    made.add_argument("--plot", type=Path, metavar="FILE", help="write the plot as SVG")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write the files that are asked for."""
    arguments = parser().parse_args(argv)
    for output in arguments.outputs:
        if not any((output / name).exists() for name in (PEERS_FILE, REPORT_FOLDER)):
            require_run(output)
    frame = comparison.table(comparison.load_reports(arguments.outputs))
    text = comparison.markdown(frame)
    print(text, end="")
    if arguments.markdown is not None:
        replace_file(arguments.markdown, text.encode())
    if arguments.plot is not None:
        replace_file(arguments.plot, comparison.draw(frame).encode())
    return 0
