"""Documents from where text is: the standard library, local files, `datasets` names.

Every reader gives a list of texts and refuses what it cannot read with a `RecipeError` that says
where the fault is.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.spec import NOT_READ, TABLES, TEXT, Split
from calibrate.tables import (
    check_column,
    column_values,
    first_rows,
    kind_of,
    likely_columns,
    read_text,
)
from formats.chat_template import has_chat_template, read_messages, render_chat
from formats.chat_tokens import ChatEncoder
from formats.errors import RecipeError

Convert = Callable[[Any], str]  # a column's value to text; ValueError says why it cannot

# What a folder is read for, by what it holds: of these pairs, the first that is there
KINDS = (
    (TABLES[:-1], TABLES[:-1]),
    ((".txt", ".py"), TEXT),
    ((".json",), (".json",)),
    (TEXT, TEXT),
)

# what a data set's publisher and `datasets` themselves put beside its tables
ABOUT = ("README.md", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")

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
    return [read_text(file) for file in files]


def local_documents(path: Path, column: str, convert: Convert) -> list[str]:
    """Documents of a file or folder.

    A text file is one document, a table's row is one, a blank one where it is null or an empty
    chat. A folder is read with its subfolders, hidden ones aside; where it holds tables, its text
    files are left out: they tell about the data. So does JSON beside other files.

    Args:
        path: A file of `TEXT` or `TABLES`, or a folder with some.
        convert: Makes a text of that column's value.

    Raises:
        RecipeError: there is no such file, or one that cannot be read.
    """
    texts: list[str] = []
    for file in _files(path):
        if kind_of(file) in TEXT:
            texts.append(read_text(file))
        else:
            texts += _texts(column_values(file, column), str(file), convert)
    return texts


def guess_columns(path: Path) -> dict[str, str]:
    """The dataset's settings that read a file or folder, found in its first table's first rows.

    Returns:
        `{"column": NAME}` or `{"messages_column": NAME}`; nothing for files of text.

    Raises:
        RecipeError: there is no such file, it cannot be read, or no column of it is a likely one.
    """
    file = _files(path)[0]
    return {} if kind_of(file) in TEXT else likely_columns(first_rows(file), str(file))


def are_tables(path: Path) -> bool:
    """Whether a file, or what of a folder is read, is a table."""
    return kind_of(_files(path)[0]) in TABLES


def left_out(path: Path) -> list[str]:
    """Names of a folder's files of text, tables and packed ones that are not read for it."""
    known, read = (*TEXT, *TABLES, *NOT_READ), {*_files(path)}
    left = [file for file in _inside(path) if kind_of(file) in known and file not in read]
    return [file.name for file in left if file.name not in ABOUT]


def _inside(path: Path) -> list[Path]:
    """Files of a folder and its subfolders, hidden ones aside."""
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    return [f for f in inside if not any(p[0] == "." for p in f.relative_to(path).parts)]


def _files(path: Path) -> list[Path]:
    """The file, or what of a folder is read; at least one."""
    files = [path]
    if path.is_dir():
        inside = _inside(path)
        found = {kind_of(file) for file in inside}
        kinds = next((kinds for marks, kinds in KINDS if found.intersection(marks)), ())
        files = [file for file in inside if kind_of(file) in kinds]
    if not files or kind_of(files[0]) not in (*TEXT, *TABLES):
        raise RecipeError(
            f"dataset {str(path)!r}: found no file of a known kind. Known: "
            f"{', '.join((*TEXT, *TABLES))}. Of another table make JSON lines, "
            '{"text": "..."} each'
        )
    return files


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
    check_column(column, rows.column_names, name)
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


class ChatText:
    """A `Convert` that renders chats, `formats.chat_template`'s, with the tokenizer's template.

    Attributes:
        ids: Token ids of those texts whose messages hold control tokens, which stay text there.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        """Of a tokenizer and the template's variables; RecipeError: it has no template."""
        check_has_template(tokenizer)
        self._tokenizer, self._variables = tokenizer, variables
        self._encoder, self.ids = ChatEncoder(tokenizer), dict[str, list[int]]()

    def __call__(self, chat: Any) -> str:
        """The text of a chat."""
        messages = read_messages(chat)
        text = render_chat(self._tokenizer, messages, self._variables)
        if self._encoder.holds_controls(messages):
            self.ids[text] = self._encoder.tokens(messages, self._variables)
        return text


def check_has_template(tokenizer: Any) -> None:
    """Refuse chats where the tokenizer has no template, with a RecipeError."""
    if not has_chat_template(tokenizer):
        raise RecipeError(
            "dataset.messages_column cannot be used: the model's tokenizer has no chat template, "
            "which makes text of chats. Give text in dataset.column; or, where the model was made "
            "for chats, put its chat_template.jinja beside its tokenizer"
        )


def divided(documents: Sequence[str], split: Split) -> list[str]:
    """The documents that one split gets of a source that serves both.

    Distinct documents, in the order of their SHA-256, go in turn to calibration and to evaluation;
    a single one is cut before its middle, at the end of a line or else at a space, or in its middle
    where its second quarter has neither, as Chinese text. Blank ones go to neither.
    """
    distinct = {text for text in documents if text.strip()}
    order = sorted(distinct, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(order) == 1:
        text, half = order[0], len(order[0]) // 2
        ends = (text.rfind(mark, half // 2, half) + 1 for mark in "\n ")
        middle = next(filter(None, ends), half)
        return [text[:middle] if split == "calibration" else text[middle:]]
    chosen = set(order[split == "evaluation" :: 2])
    return [text for text in documents if text in chosen]


def _texts(values: Iterable[Any], source: str, convert: Convert) -> list[str]:
    texts = []
    for number, value in enumerate(values, 1):
        try:
            blank = value is None or (isinstance(value, Sequence) and not value)
            text = "" if blank else convert(value)
            text.encode()  # JSON can spell lone surrogates, which are no text
        except ValueError as error:
            raise RecipeError(f"dataset {source!r}, row {number}: {error}") from error
        texts.append(text)
    return texts
