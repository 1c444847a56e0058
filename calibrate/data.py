"""Text for calibration and evaluation: from any source to token sequences with masks.

Sources, by `DatasetSpec.name`:

- `stdlib`: source files of the running interpreter's standard library, two fixed disjoint lists
  of modules for calibration and evaluation;
- a path to a text (.txt, .md, .py), JSON lines, Parquet or Arrow file, or a folder of them;
- anything else: a name for `datasets.load_dataset`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from formats.errors import RecipeError
from formats.scheme import Strict

Split = Literal["calibration", "evaluation"]
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
TEXT = (".txt", ".md", ".py")
TABLES = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


class SplitSpec(Strict):
    """How much of a source is used.

    YAML: ``calibration: {samples: 64, sequence_length: 512, seed: 0}``
    """

    samples: int = Field(default=64, ge=1)
    sequence_length: int = Field(default=512, ge=2)
    seed: int = 0


class DatasetSpec(Strict):
    """Text to calibrate on and to evaluate with.

    YAML::

        dataset:
          name: data/corpus.jsonl       # or `stdlib`, or a name for datasets.load_dataset
          column: text                  # or messages_column: messages, for chats
          calibration: {samples: 128}

    Attributes:
        name: Source; see the module's docstring. Relative paths start at the recipe's folder.
        config: Configuration of a `datasets` name.
        split: Split of a `datasets` name for calibration.
        evaluation_split: Its split for evaluation; default: other documents of `split`.
        evaluation_name: Another source for evaluation; default: other documents of `name`.
        column: Column of the text in tables.
        messages_column: Column of lists of {role, content} instead, rendered by the tokenizer's
            chat template.
        pack: Join documents with the end-of-text token and cut the stream into full sequences;
            otherwise one document a sequence, cut at its length and padded.
        calibration: Amount for calibration.
        evaluation: Amount for evaluation.
    """

    name: str = "stdlib"
    config: str | None = None
    split: str = "train"
    evaluation_split: str | None = None
    evaluation_name: str | None = None
    column: str = "text"
    messages_column: str | None = None
    pack: bool = True
    calibration: SplitSpec = SplitSpec()
    evaluation: SplitSpec = SplitSpec()

    @model_validator(mode="after")
    def _names(self) -> DatasetSpec:
        if not self.name or self.evaluation_name == "":
            raise ValueError("a dataset's name must not be empty")
        return self


@dataclass(frozen=True)
class TokenSet:
    """Token sequences of one split.

    Attributes:
        ids: int64 [sequences, length], padded on the right.
        mask: bool [sequences, length], True where a token is real.
        source: Name of the source.
        split: `calibration` or `evaluation`.
    """

    ids: Tensor
    mask: Tensor
    source: str
    split: Split

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(self.mask.sum().item())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the real tokens, sequence by sequence: padding does not enter it."""
        digest = hashlib.sha256()
        for ids in self.sequences():
            digest.update(len(ids).to_bytes(8, "little") + ids.numpy().tobytes())
        return digest.hexdigest()

    def sequences(self) -> list[Tensor]:
        """Each sequence without its padding: int64 [tokens]."""
        return [ids[mask] for ids, mask in zip(self.ids, self.mask, strict=True)]


def load_tokens(
    spec: DatasetSpec, tokenizer: Any, split: Split, root: Path | None = None
) -> TokenSet:
    """Read, tokenize and cut one split.

    Args:
        spec: What to read.
        tokenizer: A transformers tokenizer.
        split: Which amount, and which documents.
        root: Folder that relative paths start at; default the current one.

    Raises:
        RecipeError: the source is missing, empty, unreadable or too short.
    """
    amount = spec.calibration if split == "calibration" else spec.evaluation
    other = spec.evaluation_name if split == "evaluation" else None
    source = other or spec.name
    documents = _documents(spec, source, split, root or Path.cwd(), tokenizer)
    options = {"add_special_tokens": not spec.pack, "verbose": False}  # length is cut below
    encoded = [tokenizer(text, **options)["input_ids"] for text in documents]
    encoded = [ids for ids in encoded if len(ids) > 1]
    if not encoded:
        raise RecipeError(
            f"dataset {source!r}: its {split} documents hold no text ({len(documents)} documents, "
            "all empty or padding). Check the column and the file's content"
        )
    cut = _packed if spec.pack else _unpacked
    sequences = cut(encoded, amount, tokenizer.eos_token_id, source, split)
    longest = max(map(len, sequences))
    pad = tokenizer.pad_token_id or 0
    ids = torch.full((len(sequences), longest), pad, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    return TokenSet(ids, mask, source, split)


def _packed(
    encoded: list[list[int]], amount: SplitSpec, eos: int | None, source: str, split: Split
) -> list[list[int]]:
    """Windows of the joined documents, chosen by the seed."""
    end = [] if eos is None else [eos]
    stream = [token for ids in encoded for token in (*ids, *end)]
    length = amount.sequence_length
    windows = len(stream) // length
    if windows < amount.samples:
        raise RecipeError(
            f"dataset {source!r}: {split} needs {amount.samples} x {length} tokens = "
            f"{amount.samples * length}, found {len(stream)}. Lower dataset.{split}.samples to at "
            f"most {windows}, shorten sequence_length, or give more text"
        )
    return [stream[i * length : (i + 1) * length] for i in _choose(windows, amount)]


def _unpacked(
    encoded: list[list[int]], amount: SplitSpec, eos: int | None, source: str, split: Split
) -> list[list[int]]:
    """Documents chosen by the seed, cut at the sequence length."""
    if len(encoded) < amount.samples:
        raise RecipeError(
            f"dataset {source!r}: {split} needs {amount.samples} documents, found {len(encoded)}. "
            f"Lower dataset.{split}.samples, or give more text"
        )
    return [encoded[i][: amount.sequence_length] for i in _choose(len(encoded), amount)]


def _choose(available: int, amount: SplitSpec) -> list[int]:
    generator = torch.Generator().manual_seed(amount.seed)
    return torch.randperm(available, generator=generator)[: amount.samples].tolist()


def _documents(
    spec: DatasetSpec, source: str, split: Split, root: Path, tokenizer: Any
) -> list[str]:
    """Texts of one split."""
    if source == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        return [_read_text(folder / f"{module}.py") for module in STDLIB[split]]
    path = root / source
    if path.exists():
        documents = _local_documents(spec, path, tokenizer)
    elif path.suffix in (*TEXT, *TABLES) or source.startswith((".", "/", "~")):
        raise RecipeError(f"dataset {source!r}: {path} does not exist")
    else:
        documents = _named_documents(spec, source, split, tokenizer)
        if spec.evaluation_split is not None:
            return documents
    if spec.evaluation_name is not None and spec.evaluation_name != spec.name:
        return documents
    return _side(documents, split)


def _side(documents: list[str], split: Split) -> list[str]:
    """Documents of one side of a source that serves both, told apart by their content's hash.

    A single document is cut in the middle, at a line's end.
    """
    if len(documents) == 1:
        lines = documents[0].splitlines(keepends=True)
        half = len(lines) // 2
        return ["".join(lines[:half] if split == "calibration" else lines[half:])]
    wanted = 0 if split == "calibration" else 1
    return [text for text in documents if hashlib.sha256(text.encode()).digest()[0] % 2 == wanted]


def _local_documents(spec: DatasetSpec, path: Path, tokenizer: Any) -> list[str]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    texts: list[str] = []
    known = [file for file in files if file.suffix in (*TEXT, *TABLES)]
    if not known:
        raise RecipeError(
            f"dataset {str(path)!r}: found no file of a known kind. Known: "
            f"{', '.join((*TEXT, *TABLES))}"
        )
    for file in known:
        if file.suffix in TEXT:
            texts.append(_read_text(file))
        elif file.suffix == ".jsonl":
            texts += _texts(spec, _json_rows(file), str(file), tokenizer)
        else:
            texts += _texts(spec, _table_rows(file), str(file), tokenizer)
    return texts


def _named_documents(spec: DatasetSpec, source: str, split: Split, tokenizer: Any) -> list[str]:
    import datasets

    part = spec.evaluation_split if split == "evaluation" and spec.evaluation_split else spec.split
    try:
        rows = datasets.load_dataset(source, spec.config, split=part)
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"dataset {source!r}: datasets.load_dataset cannot read it ({error}). Check the name, "
            "its config and split, and the network; or give a local file, or `stdlib`"
        ) from error
    return _texts(spec, rows, source, tokenizer)  # pyright: ignore[reportArgumentType]


def _texts(
    spec: DatasetSpec, rows: Iterable[dict[str, Any]], source: str, tokenizer: Any
) -> list[str]:
    """The text of every row, by its column or its rendered messages."""
    column = spec.messages_column or spec.column
    texts = []
    for number, row in enumerate(rows, 1):
        if column not in row:
            near = difflib.get_close_matches(column, list(row), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RecipeError(
                f"dataset {source!r}, row {number}: no column {column!r}{hint} Found: "
                f"{', '.join(row)}. Set dataset.column or dataset.messages_column"
            )
        value = row[column]
        if spec.messages_column is not None:
            value = _render(tokenizer, value, source, number)
        if not isinstance(value, str):
            raise RecipeError(
                f"dataset {source!r}, row {number}: column {column!r} holds "
                f"{type(value).__name__}, not text. Lists of messages go to dataset.messages_column"
            )
        texts.append(value)
    return texts


def _render(tokenizer: Any, messages: Any, source: str, number: int) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise RecipeError(
            f"dataset {source!r}: the model's tokenizer has no chat template, so "
            "dataset.messages_column cannot be used; give text in dataset.column"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise RecipeError(
            f"dataset {source!r}, row {number}: the chat template cannot render it ({error})"
        ) from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{file}: not UTF-8 at byte {error.start} ({error.reason}). Convert it to UTF-8"
        ) from error
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror})") from error


def _json_rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read_text(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(f"{file}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RecipeError(f"{file}:{number}: a row is an object of columns, found {line[:40]}")
        rows.append(row)
    return rows


def _table_rows(file: Path) -> Sequence[dict[str, Any]]:
    import pyarrow

    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(file).to_pylist()
        with pyarrow.memory_map(str(file)) as source:
            try:
                return pyarrow.ipc.open_file(source).read_all().to_pylist()
            except pyarrow.ArrowInvalid:
                source.seek(0)
                return pyarrow.ipc.open_stream(source).read_all().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise RecipeError(f"{file}: not a readable {file.suffix[1:]} file ({error})") from error
