"""How a person reads figures, tables and paths, and names modules on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def size_text(nbytes: float) -> str:
    """Bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return (
                f"{nbytes / size:.3g} {unit}" if nbytes < 1e12 else f"{nbytes / size:,.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def duration_text(seconds: float) -> str:
    """A time for a person, such as `12 s`, `3 min` or `1.5 h`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def percent(share: float, digits: int = 2) -> str:
    """A share as per cent."""
    return f"{100 * share:.{digits}f}%" if share else "0%"


def decibel(ratio: float | None) -> str:
    """dB, or a dash where nothing was lost or measured."""
    return "–" if ratio is None else f"{ratio:.1f}"


def scale_text(low: float, high: float) -> str:
    """One scale, or the range of several."""
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def interval_text(ends: tuple[float, float] | None, digits: int = 4, form: str = "f") -> str:
    """An interval, or that there was too little to tell one."""
    if ends is None:
        return "needs 2 sequences"
    return f"{ends[0]:.{digits}{form}} to {ends[1]:.{digits}{form}}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first aligned to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def typed_path(path: Path) -> str:
    """A path from the current directory where it is below it; otherwise absolute."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name contains a pattern, or matches it where it has `*` or `?`."""
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(name, pattern)
    return pattern in name
