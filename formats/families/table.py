"""What holds of each declared family: read from the table beside this file.

The table of README.md is measured, not written: `python -m tests.families_table` makes it from tiny
models of every declared type, and a test compares each row with what it finds. Reading it imports
neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parent / "README.md"
COLUMNS = ("family", "smoothing", "CPU", "GPU", "cache", "transformers", "vLLM")
BEGIN, END = "<!-- families -->", "<!-- end -->"


def read_table() -> list[dict[str, str]]:
    """Rows of the table, one for each declared model type and one for all others, by column."""
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells]


def with_table(rows: list[dict[str, str]]) -> str:
    """The document with other rows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = [COLUMNS, tuple("---" for _ in COLUMNS)]
    lines += [(f"`{row['family']}`", *(row[c] for c in COLUMNS[1:])) for row in rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
