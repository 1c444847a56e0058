"""Documents from where text lies: the standard library, local files, `datasets` names.

Every reader gives a list of texts and refuses what it cannot read with a `RecipeError` that says
where the fault is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from calibrate.spec import TABLES, TEXT, Split
from formats.errors import RecipeError

Convert = Callable[[Any], str]  # a column's value to text; ValueError says why it cannot

# Modules that every Python from 3.11 to 3.14 has as one file. The lists never change: they are
# what a fingerprint of `stdlib` stands for.
STDLIB: dict[Split, tuple[str, ...]] = {
    "calibration": tuple(
        "argparse ast bdb calendar cmd codecs configparser contextlib csv dataclasses difflib"
        " doctest enum fileinput fractions ftplib functools gettext gzip heapq imaplib inspect"
        " ipaddress mailbox modulefinder optparse".split()
    ),
    "evaluation": tuple(
        "os pdb pickle pickletools platform plistlib pprint profile pstats pydoc random runpy"
        " selectors shelve shlex shutil smtplib socket socketserver statistics subprocess tarfile"
        " tempfile textwrap threading tokenize trace traceback typing uuid weakref".split()
    ),
}


def stdlib_documents(split: Split) -> list[str]:
    """Sources of the running interpreter's standard library, one document a module.

    Raises:
        RecipeError: the interpreter comes without them.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{module}.py" for module in STDLIB[split]]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise RecipeError(
            f"dataset 'stdlib': this Python has no source of {', '.join(missing)} in {folder}. "
            "Use a Python that comes with its whole standard library, or set dataset.name to a "
            "file of text"
        )
    return [_read_text(file) for file in files]


def local_documents(path: Path, column: str, convert: Convert) -> list[str]:
    """Documents of a file or folder.

    A text file is one document, a table's row is one. A folder is read with its subfolders, hidden
    ones aside; where it holds tables, its text files are left out: they tell about the data.

    Args:
        path: A file of `TEXT` or `TABLES`, or a folder with some.
        column: The tables' column to read.
        convert: Makes a text of that column's value.

    Raises:
        RecipeError: there is no such file, or one that cannot be read.
    """
    files = [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        inside = [f for f in inside if not any(p[0] == "." for p in f.relative_to(path).parts)]
        files = [f for f in inside if f.suffix in TABLES] or [f for f in inside if f.suffix in TEXT]
    if not files or files[0].suffix not in (*TEXT, *TABLES):
        raise RecipeError(
            f"dataset {str(path)!r}: found no file of a known kind. Known: "
            f"{', '.join((*TEXT, *TABLES))}"
        )
    texts: list[str] = []
    for file in files:
        if file.suffix in TEXT:
            texts.append(_read_text(file))
        elif file.suffix == ".jsonl":
            texts += _texts(_json_column(file, column), str(file), convert)
        else:
            texts += _texts(_table_column(file, column), str(file), convert)
    return texts


def named_documents(
    name: str, config: str | None, part: str, column: str, convert: Convert
) -> list[str]:
    """Documents of a split of what `datasets.load_dataset` finds under a name.

    Raises:
        RecipeError: it finds nothing, or has no such column.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(name, config, split=part)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise RecipeError(
            f"dataset {name!r}: datasets.load_dataset cannot read it ({error}). Check the name, "
            "its config and split, and the network; or give a local file, or `stdlib`"
        ) from error
    assert isinstance(rows, datasets.Dataset)
    _check_column(column, rows.column_names, name)
    return _texts(rows[column], name, convert)


def plain_text(value: Any) -> str:
    """The value of a column of text, for `Convert`.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str):
        raise ValueError(
            f"the column holds {type(value).__name__}, not text. Lists of messages go to "
            "dataset.messages_column"
        )
    return value


def chat_text(tokenizer: Any, variables: Mapping[str, Any]) -> Convert:
    """A `Convert` that renders lists of {role, content} with the tokenizer's chat template.

    Raises:
        RecipeError: the tokenizer has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RecipeError(
            "dataset.messages_column cannot be used: the model's tokenizer has no chat template; "
            "give text in dataset.column"
        )

    def render(messages: Any) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except (TypeError, KeyError, ValueError, AttributeError, TemplateError) as error:
            raise ValueError(f"the chat template cannot render it ({error})") from error

    return render


def divided(documents: Sequence[str], split: Split) -> list[str]:
    """The documents that one split gets of a source that serves both.

    Distinct documents, in the order of their SHA-256, go in turn to calibration and to evaluation;
    a single one is cut at the line's end, or else the space, before its middle. Blank ones go to
    neither.
    """
    distinct = {text for text in documents if text.strip()}
    order = sorted(distinct, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(order) == 1:
        text, half = order[0], len(order[0]) // 2
        middle = text.rfind("\n", 0, half) + 1 or text.rfind(" ", 0, half) + 1 or len(text)
        return [text[:middle] if split == "calibration" else text[middle:]]
    chosen = set(order[split == "evaluation" :: 2])
    return [text for text in documents if text in chosen]


def _texts(values: Iterable[Any], source: str, convert: Convert) -> list[str]:
    texts = []
    for number, value in enumerate(values, 1):
        try:
            text = convert(value)
            text.encode()  # JSON can spell lone surrogates, which are no text
        except ValueError as error:
            raise RecipeError(f"dataset {source!r}, row {number}: {error}") from error
        texts.append(text)
    return texts


def _check_column(column: str, found: Sequence[str], source: str) -> None:
    if column not in found:
        near = difflib.get_close_matches(column, found, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise RecipeError(
            f"dataset {source!r}: no column {column!r}{hint} Found: {', '.join(found)}. Set "
            "dataset.column or dataset.messages_column"
        )


def _read_text(file: Path) -> str:
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


def _json_column(file: Path, column: str) -> list[Any]:
    values = []
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{file}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RecipeError(f"{file}:{number}: a row is an object of columns, found {line[:40]}")
        _check_column(column, list(row), f"{file}:{number}")
        values.append(row[column])
    return values


def _table_column(file: Path, column: str) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            names = pq.read_schema(file).names
            _check_column(column, names, str(file))
            return pq.read_table(file, columns=[column]).column(column).to_pylist()
        with pa.memory_map(str(file)) as source:
            try:
                table = pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                table = pa.ipc.open_stream(source).read_all()
            _check_column(column, table.column_names, str(file))
            return table.column(column).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RecipeError(f"{file}: not a readable {file.suffix[1:]} file ({error})") from error
