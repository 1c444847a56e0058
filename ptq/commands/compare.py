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

from formats.files import replace_file
from ptq.report.comparison import draw, load_reports, markdown, table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write the files that are asked for."""
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="ptq compare", description=summary)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="OUTPUT")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot as SVG")
    arguments = parser.parse_args(argv)
    frame = table(load_reports(arguments.outputs))
    text = markdown(frame)
    print(text, end="")
    if arguments.markdown is not None:
        replace_file(arguments.markdown, text.encode())
    if arguments.plot is not None:
        replace_file(arguments.plot, draw(frame).encode())
    return 0
