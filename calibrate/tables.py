"""Tables in local files: JSON lines, Parquet, Arrow; and which of their columns is read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import RecipeError

if TYPE_CHECKING:
    import pyarrow

CHATS = ("messages", "conversations", "conversation")  # names that columns of chats usually have
TEXTS = ("text", "content", "src")  # and those of text; `src` is the prompt in rows of {src, tgt}


def column_values(file: Path, column: str) -> list[Any]:
    """All values of a table's column.

    Raises:
        RecipeError: the file cannot be read, or has no such column.
    """
    if file.suffix == ".jsonl":
        values = []
        for place, row in _json_rows(file):
            check_column(column, list(row), place)
            values.append(row[column])
        return values
    with _pyarrow_errors(file):
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            check_column(column, pq.read_schema(file).names, str(file))
            return pq.read_table(file, columns=[column]).column(column).to_pylist()
        table = _arrow_table(file)
        check_column(column, table.column_names, str(file))
        return table.column(column).to_pylist()


def first_row(file: Path) -> dict[str, Any]:
    """The first row of a table; empty where it has none.

    Raises:
        RecipeError: the file cannot be read.
    """
    if file.suffix == ".jsonl":
        return next((row for _, row in _json_rows(file)), {})
    with _pyarrow_errors(file):
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(file) as parquet:
                batches = parquet.iter_batches(batch_size=1)
                rows = next((batch.to_pylist() for batch in batches), [])
        else:
            rows = _arrow_table(file).slice(0, 1).to_pylist()
    return rows[0] if rows else {}


def check_column(column: str, found: Sequence[str], source: str) -> None:
    """Check that a table has a column.

    Raises:
        RecipeError: it has not; names what it has and the setting that reads it.
    """
    if column in found:
        return
    near = difflib.get_close_matches(column, found, 1)
    chats = [name for name in CHATS if name in found]
    texts = [name for name in TEXTS if name in found]
    remedy = "Set dataset.column or dataset.messages_column"
    if chats:
        remedy = f"For its chats set dataset.messages_column: {chats[0]}"
    elif texts:
        remedy = f"Set dataset.column: {texts[0]}"
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise RecipeError(
        f"dataset {source!r}: no column {column!r}{hint} Found: {', '.join(found)}. {remedy}"
    )


def likely_columns(row: Mapping[str, Any], source: str) -> dict[str, str]:
    """The dataset's settings that read rows like this one.

    In this order: a column of text named `text`; one of chats, by the names in `CHATS`; one of text
    named `content` or `src`; the only column of text.

    Args:
        row: The first row of a table.
        source: The table's name, for the error.

    Returns:
        `{"column": NAME}` or `{"messages_column": NAME}`.

    Raises:
        RecipeError: none of them is there.
    """
    if not row:
        raise RecipeError(
            f"dataset {source!r}: cannot tell which column to read: it holds no rows. Give a file "
            "with text in it"
        )
    texts = [name for name, value in row.items() if isinstance(value, str)]
    chats = [name for name in CHATS if isinstance(row.get(name), list)]
    if chats and "text" not in texts:
        return {"messages_column": chats[0]}
    named = [name for name in TEXTS if name in texts]
    if named or len(texts) == 1:
        return {"column": (named or texts)[0]}
    raise RecipeError(
        f"dataset {source!r}: cannot tell which column to read. Found: "
        f"{', '.join(row)}. Name the column of text `text`, or that of chats `messages`; "
        "or set dataset.column or dataset.messages_column in a recipe"
    )


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark and with LF at the ends of lines.

    Raises:
        RecipeError: it cannot be read, or is not UTF-8.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{file}: not UTF-8 at byte {error.start} ({error.reason}). Convert it to UTF-8"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place, `FILE:LINE`; empty lines are skipped."""
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{place}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RecipeError(f"{place}: a row is an object of columns, found {line[:40]}")
        yield place, row


@contextmanager
def _pyarrow_errors(file: Path) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into one error that names it."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RecipeError(f"{file}: not a readable {file.suffix[1:]} file ({error})") from error


def _arrow_table(file: Path) -> pyarrow.Table:
    """A file in Arrow's format for files, or else in the one for streams."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()
