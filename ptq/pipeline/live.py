"""What is shown while a run goes on: a table that grows by a line a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

from formats.command import say
from formats.scale_table import ScaleEntry
from ptq.result import BlockRow, ModuleRow
from ptq.text import decibel, percent, size_text

HEAD = ("block", "worst layer", "SQNR", "of rounding", "clipped", "seconds", "memory")
WIDTH = 12


class LiveTable:
    """Prints a line for each block, above the progress bar.

    The worst layer is that of the least SQNR: of its output in dB, beside that of plain
    round-to-nearest. Clipped is the largest share of a layer's weights or inputs, or of a cache,
    that a scale of the block cuts off.
    """

    def __init__(self, *, shown: bool, blocks: Sequence[str], layers: Sequence[str]) -> None:
        self._shown = shown
        names = (name.removeprefix(f"{block}.") for block in blocks[:1] for name in layers)
        self._first = max(map(len, (*blocks, HEAD[0])), default=0)
        self._second = max((len(n) for n in names if n not in layers), default=0)
        if shown:
            say(self._line(HEAD))

    def add(self, rows: Sequence[ModuleRow], entries: Sequence[ScaleEntry], cost: BlockRow) -> None:
        """Print the line of a block."""
        if not self._shown:
            return
        measured = [row for row in rows if row.output_sqnr_db is not None]
        worst = min(measured, key=lambda row: row.output_sqnr_db or math.inf, default=None)
        clipped = max((entry.clip_fraction for entry in entries), default=0.0)
        say(
            self._line(
                (
                    cost.block,
                    worst.module.removeprefix(f"{cost.block}.") if worst else "–",
                    decibel(worst.output_sqnr_db if worst else None),
                    decibel(worst.baseline_output_sqnr_db if worst else None),
                    percent(clipped, 3),
                    f"{cost.seconds:.1f}",
                    size_text(cost.memory_bytes),
                )
            )
        )

    def _line(self, cells: Sequence[str]) -> str:
        first, second, *others = cells
        width = max(self._second, len(HEAD[1]))
        start = f"{first.ljust(self._first)}  {second.ljust(width)}"
        return (start + "".join(cell.rjust(WIDTH) for cell in others)).rstrip()
