"""What is told of each layer while a run goes on: a table that grows block by block."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from formats.scale_table import ScaleEntry
from ptq.result import BlockRow, ModuleRow
from ptq.text import decibel, percent, size_text

HEAD = ("module", "SQNR", "of rounding", "clipped", "seconds", "memory")
WIDTH = 12


class LiveTable:
    """Prints rows above the progress bar.

    SQNR is that of the layer's output in dB, beside that of plain round-to-nearest; clipped is the
    share of its weights or inputs, whichever is larger, that its scales cut off. Seconds and memory
    are the block's.
    """

    def __init__(self, *, shown: bool, names: Sequence[str]) -> None:
        self._shown, self._width = shown, max(map(len, names), default=0)
        if shown and names:
            self._print(self._line(HEAD))

    def add(self, rows: Sequence[ModuleRow], entries: Sequence[ScaleEntry], cost: BlockRow) -> None:
        """Print the rows of a block."""
        if self._shown and rows:
            self._print("\n".join(self._lines(rows, entries, cost)))

    def _lines(
        self, rows: Sequence[ModuleRow], entries: Sequence[ScaleEntry], cost: BlockRow
    ) -> Iterator[str]:
        clipped: dict[str, float] = {}
        for entry in entries:
            clipped[entry.module] = max(clipped.get(entry.module, 0.0), entry.clip_fraction)
        for i, row in enumerate(rows):
            last = i == len(rows) - 1
            yield self._line(
                (
                    row.module,
                    decibel(row.output_sqnr_db),
                    decibel(row.baseline_output_sqnr_db),
                    percent(clipped.get(row.module, 0.0), 3),
                    f"{cost.seconds:.1f}" if last else "",
                    size_text(cost.memory_bytes) if last else "",
                )
            )

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = cells
        return (first.ljust(self._width) + "".join(c.rjust(WIDTH) for c in others)).rstrip()

    @staticmethod
    def _print(line: str) -> None:
        tqdm.write(line, file=sys.stderr)
