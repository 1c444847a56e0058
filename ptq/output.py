"""What is in a run's output folder, by name; known without reading any of it.

How a person reads figures, tables and paths, and names modules on a command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from formats.errors import CheckpointError
from formats.hub import near_folder
from formats.lock import LOCK_FILE, refuse_busy

CHECKPOINT_FOLDER = "checkpoint"
RESULT_FILE = "quantization.json"
RECIPE_FILE = "recipe.yaml"
REPORT_FOLDER = "report"
STATISTICS_FILE = "statistics.safetensors"
FOUND_FILE = "found.safetensors"  # what methods found by running samples
RESUME_FOLDER = ".resume"  # what a stopped run goes on with
GRADIENTS_FOLDER = ".gradients"  # what its backward pass showed
PROGRESS_FILE = "progress.json"  # in it: how far that run has come
BUDGET_FOLDER = "budget"  # what a recipe with a budget chooses from
PEER_LOGS, PEERS_FILE = "peers", "peers.json"  # what `ptq peers` writes


def unfinished(output: Path) -> bool:
    """Whether a run of this output folder was stopped before its end."""
    return (output / RESUME_FOLDER / PROGRESS_FILE).is_file()


def require_run(output: Path) -> None:
    """Check that a run has ended in an output folder.

    Raises:
        CheckpointError: it has not, another process works there, or there is no such folder.
    """
    if (output / RESULT_FILE).is_file():
        return
    refuse_busy(output)
    if not output.is_dir():
        found = f"no such folder; {near_folder(output)}give"
    elif unfinished(output):
        found = "its run has not ended; the same `ptq run` goes on where it was stopped, or give"
    elif (output.parent / RESULT_FILE).is_file():
        found = f"found no {RESULT_FILE}; did you mean {output.parent}? Give"
    else:
        found = f"found no {RESULT_FILE}; give"
    raise CheckpointError(f"{output}: {found} the output folder of a finished `ptq run`")


def kept_bytes(output: Path) -> int:
    """Size of what a stopped run has left to go on with."""
    folders = (output / RESUME_FOLDER, output / GRADIENTS_FOLDER)
    files = (path for folder in folders for path in folder.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def is_taken(path: Path) -> bool:
    """Whether an output path holds anything but a run to go on with, or what `ptq peers` wrote.

    A run that was killed before it had stored anything, or while it removed what it had, leaves the
    folder of what is stored, with nothing in it to trust.
    """
    if unfinished(path) or not path.exists():
        return False
    own = {PEER_LOGS, PEERS_FILE, RESUME_FOLDER, GRADIENTS_FOLDER, BUDGET_FOLDER, LOCK_FILE}
    return not path.is_dir() or any(entry.name not in own for entry in path.iterdir())


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
