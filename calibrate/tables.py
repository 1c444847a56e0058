"""Tables in local files: JSON, Parquet, Arrow, CSV; and which of their columns is read."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.chat_template import looks_like_chat
from formats.errors import RecipeError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

CHATS = ("messages", "conversations", "conversation")  # names that columns of chats usually have
# and those of text; `src` is the prompt in rows of {src, tgt}
TEXTS = ("text", "content", "document", "article", "passage", "story", "code", "src")
JSON = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FIRST = 32  # rows that a table's columns are known by


def kind_of(file: Path) -> str:
    """A file's suffix in small letters: some programs write large ones."""
    return file.suffix.lower()


def column_values(file: Path, column: str) -> list[Any]:
    """All values of a table's column; None where a row has none.

    Raises:
        RecipeError: the file cannot be read, or has no such column.
    """
    if kind_of(file) in JSON:
        values = []
        for place, row in _json_rows(file):
            if row is not None:
                check_column(column, list(row), place)
            values.append(None if row is None else row[column])
        return values
    if kind_of(file) in SEPARATORS:
        rows = _separated_rows(file)
        check_column(column, list(rows), str(file))
        return rows[column].tolist()
    with _pyarrow_errors(file):
        if kind_of(file) == ".parquet":
            import pyarrow.parquet as pq

            check_column(column, pq.read_schema(file).names, str(file))
            return pq.read_table(file, columns=[column]).column(column).to_pylist()
        table = _arrow_table(file)
        check_column(column, table.column_names, str(file))
        return table.column(column).to_pylist()


def first_rows(file: Path) -> list[dict[str, Any]]:
    """The first rows of a table, those that are null left out.

    Raises:
        RecipeError: the file cannot be read.
    """
    if kind_of(file) in JSON:
        return list(islice((row for _, row in _json_rows(file) if row is not None), FIRST))
    if kind_of(file) in SEPARATORS:
        return _separated_rows(file).head(FIRST).to_dict("records")
    with _pyarrow_errors(file):
        if kind_of(file) == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(file) as parquet:
                batches = parquet.iter_batches(batch_size=FIRST)
                return next((batch.to_pylist() for batch in batches), [])
        return _arrow_table(file).slice(0, FIRST).to_pylist()


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


def likely_columns(rows: Sequence[Mapping[str, Any]], source: str) -> dict[str, str]:
    """The dataset's settings that read rows like these.

    In this order: a column of text named `text`; one of chats, by the names in `CHATS`; the only
    one that holds chats, whatever its name, or of preferences what was chosen; one of text by the
    names in `TEXTS`; text in a table's only column.

    Args:
        rows: The first ones of a table.
        source: The table's name, for the error.

    Returns:
        `{"column": NAME}` or `{"messages_column": NAME}`.

    Raises:
        RecipeError: none of them is there.
    """
    if not any(rows):
        raise RecipeError(
            f"dataset {source!r}: cannot tell which column to read: it holds no rows. Give a file "
            "with text in it"
        )
    columns = {name: next(filter(None, (row.get(name) for row in rows)), None) for name in rows[0]}
    parted = {"chosen", "completion"} & columns.keys()
    chats = [
        name
        for name in columns
        if any(looks_like_chat(row.get(name), answers=name.lower() in CHATS) for row in rows)
    ]
    left = {name: value for name, value in columns.items() if name not in chats}
    texts = [name for name, v in left.items() if isinstance(v, str) and not _is_printed(name, v)]
    found = _named(("text",), texts)
    if found is not None:
        return {"column": found}
    parts = ("prompt", "rejected") if parted else ()
    found = _named(CHATS, chats) or _only([name for name in chats if name not in parts])
    if found is not None:
        return {"messages_column": found}
    found = _named(TEXTS, texts) or (_only(texts) if len(columns) == 1 else None)
    if found is not None:
        return {"column": found}
    raise RecipeError(
        f"dataset {source!r}: cannot tell which column to read. Found: "
        f"{', '.join(f'{name} ({_kind(name, value)})' for name, value in columns.items())}. "
        f"{_settings(texts, chats)}; or name the column of text `text`, or that of chats "
        f"`messages`{APART if parted or len(texts) > 1 else ''}"
    )


APART = (
    ". Where a prompt and its answer are apart, put both, of preferences the chosen one, together: "
    '{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]} each'
)


def _named(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column that has the first of some names, in whatever case."""
    known = {column.lower(): column for column in reversed(columns)}
    return next((known[name] for name in names if name in known), None)


def _only(columns: Sequence[str]) -> str | None:
    return columns[0] if len(columns) == 1 else None


def _is_printed(name: str, value: Any) -> bool:
    """Whether a column of chats holds what Python prints of a list, as pandas writes it to CSV."""
    return name.lower() in CHATS and isinstance(value, str) and value.lstrip()[:2] == "[{"


def _kind(name: str, value: Any) -> str:
    if looks_like_chat(value):
        return "chats"
    if _is_printed(name, value):
        return "chats as Python prints them: write them as JSON"
    return "text" if isinstance(value, str) else "empty" if value is None else type(value).__name__


def _settings(texts: Sequence[str], chats: Sequence[str]) -> str:
    """How to say which column is read."""
    keys = [f"dataset.messages_column={name}" for name in chats]
    keys += [f"dataset.column={name}" for name in texts]
    given = " or ".join(f"`--set {key}`" for key in keys)
    return f"Give {given}" if given else "None of them holds text"


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


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each row with its place, such as `FILE:LINE`; empty lines are skipped, null is None."""
    text = read_text(file)
    if kind_of(file) == ".json" and text.lstrip()[:1] == "[":
        for number, row in enumerate(_parsed(text, str(file)), 1):
            place = f"{file}, row {number}"
            yield place, {"text": row} if isinstance(row, str) else _checked(row, place)
        return
    if kind_of(file) == ".json" and (row := _only_object(text)) is not None:
        yield str(file), row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{file}:{number}"
            yield place, _checked(_parsed(line, place), place)


def _only_object(text: str) -> dict[str, Any] | None:
    """The object that a text is as a whole, on however many lines; None of JSON lines."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{place}: not JSON ({error})") from error


def _checked(row: Any, place: str) -> dict[str, Any] | None:
    if row is not None and not isinstance(row, dict):
        raise RecipeError(f"{place}: a row is an object of columns, found {json.dumps(row)[:40]}")
    return row


def _separated_rows(file: Path) -> pd.DataFrame:
    """A table whose first line names its columns; all of its values are text.

    Where it has semicolons alone, as spreadsheets write them in many countries, these part a CSV's.
    """
    import pandas as pd

    text = read_text(file)
    sep, names = SEPARATORS[kind_of(file)], text.partition("\n")[0]
    sep = ";" if sep == "," and ";" in names and sep not in names else sep
    try:
        rows = pd.read_csv(io.StringIO(text), sep=sep, dtype=str, keep_default_na=False)
        if not isinstance(rows.index, pd.RangeIndex):  # pandas takes fields without a name for it
            raise ValueError(
                f"rows have more fields than its first line names, {len(rows.columns)}; put "
                f'texts with {sep!r} in them in quotes: "a{sep} b"'
            )
        return rows
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{file}: not a readable {kind_of(file)[1:]} file ({reason})") from error


@contextmanager
def _pyarrow_errors(file: Path) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into one error that names it."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RecipeError(f"{file}: not a readable {kind_of(file)[1:]} file ({error})") from error


def _arrow_table(file: Path) -> pyarrow.Table:
    """A file in Arrow's format for files, or else in the one for streams."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()
