"""Text for calibration and evaluation: from any source to token sequences with masks.

How texts become sequences is described in `calibrate.windows`.

Sources, by `DatasetSpec.name`:

- `stdlib`: source files of the running interpreter's standard library, two fixed disjoint lists
  of modules for calibration and evaluation;
- a path to a text (.txt, .md, .py), JSON, Parquet, Arrow or CSV file, or a folder of them;
- anything else: a name for `datasets.load_dataset`.

No document serves both splits. A source that serves both is divided: its distinct documents, in the
order of their SHA-256, go in turn to calibration and to evaluation; a single document is cut at a
line's end near its middle. Where evaluation has its own source or split, documents that calibration
also has are left out of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from calibrate.sources import (
    ChatText,
    Convert,
    are_tables,
    divided,
    left_out,
    local_documents,
    named_documents,
    plain_text,
    stdlib_documents,
)
from calibrate.spec import TABLES, TEXT, DatasetSpec, Split
from calibrate.tables import kind_of
from calibrate.windows import are_rendered, cut_windows, windows_in_template
from formats.chat_template import has_chat_template
from formats.errors import RecipeError

FEWEST_OTHER = 8  # sequences of the other kind of text that models are measured on
NO_CHATS = (
    "the model has a chat template, and these data are no chats: {share}. Better are chats like "
    "those that it will meet: rows with a column of messages (dataset.messages_column)"
)
NO_SHARE = "what calibration sees has none of the template's tokens"
SHARE = "{count} of {samples} sequences hold their text as chats in that template"

Kind = Literal["prose", "chat"]


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Token sequences of one split.

    Attributes:
        ids: int64 [sequences, length], padded on the right.
        mask: bool [sequences, length], True where a token is real.
        split: `calibration` or `evaluation`.
        kind: What the data are: chats in the model's template, or other text.
        notes: What was read of the source, for a person.
        warning: In what they are not what the model will meet; "" where nothing is known.
        also: Beside an evaluation's, text of the other kind that models are compared on.
    """

    ids: Tensor
    mask: Tensor
    source: str
    split: Split
    kind: Kind = "prose"
    notes: tuple[str, ...] = ()
    warning: str = ""
    also: TokenSet | None = None

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

    Where the tokenizer has a chat template and the data are no chats, some sequences of calibration
    hold their text in it (`DatasetSpec.in_template`), and an evaluation has its text in it as well.

    Args:
        split: Which amount, and which documents.
        root: Folder that relative paths start at; default the current one.

    Raises:
        RecipeError: the source is missing, empty, unreadable or too short.
    """
    root = root or Path.cwd()
    tokens = _load(spec, tokenizer, split, root)
    if split == "calibration":
        return tokens
    return replace(tokens, also=_other_kind(spec, tokenizer, tokens, root))


def _load(spec: DatasetSpec, tokenizer: Any, split: Split, root: Path) -> TokenSet:
    """One split, of the data's own kind."""
    amount = spec.calibration if split == "calibration" else spec.evaluation
    source = (spec.evaluation_name if split == "evaluation" else None) or spec.name
    templated = spec.messages_column is not None
    rendered = ChatText(tokenizer, spec.chat_template_kwargs) if templated else None
    texts, notes = _documents(spec, split, root, rendered or plain_text)
    chats = templated or are_rendered(texts, tokenizer)
    wrapped, warning = list[list[int]](), ""
    if split == "calibration" and has_chat_template(tokenizer) and not chats:
        wrapped, warning = _in_template(spec, texts, tokenizer)
    needed = amount.samples - len(wrapped)
    sequences, found = cut_windows(
        texts,
        amount.model_copy(update={"samples": needed}),
        tokenizer,
        templated=templated,
        spelled=rendered.ids if rendered else {},
        chats=chats,
        pack=spec.pack,
        shorter=spec.fewer,
    )
    if needed and not found:
        raise RecipeError(
            f"dataset {source!r}: its {split} documents hold no text ({len(texts)} documents, "
            "all empty or padding; a single one is divided in its middle). Check the "
            "column and the file's content, or give more text"
        )
    if len(sequences) < (1 if spec.fewer and needed else needed):
        size = f" of {amount.sequence_length} tokens each" if spec.pack else ", one document each"
        raise RecipeError(
            f"dataset {source!r}: {split} needs {amount.samples} samples{size}; found {found} "
            f"{'tokens' if spec.pack else 'documents with text'}, enough for {len(sequences)}. "
            f"Lower dataset.{split}.samples, set dataset.fewer, give more text"
            f"{', or lower sequence_length' if spec.pack else ''}"
        )
    ids, mask = _padded([*wrapped, *sequences], tokenizer.pad_token_id or 0)
    return TokenSet(ids, mask, source, split, "chat" if chats else "prose", notes, warning)


def _other_kind(
    spec: DatasetSpec, tokenizer: Any, evaluation: TokenSet, root: Path
) -> TokenSet | None:
    """What `dataset.also` names; or text that is no chats, in the template; None without one."""
    samples = min(len(evaluation.ids), max(FEWEST_OTHER, len(evaluation.ids) // 4))
    amount = spec.evaluation.model_copy(update={"samples": samples})
    if spec.also is not None:
        own = DatasetSpec(**dict(spec.also), pack=spec.pack, fewer=True, evaluation=amount)
        return _load(own, tokenizer, "evaluation", root)
    if evaluation.kind == "chat" or not has_chat_template(tokenizer):
        return None
    texts, _ = _documents(spec, "evaluation", root, plain_text)
    try:
        made = windows_in_template(texts, amount, tokenizer, pack=spec.pack)
    except ValueError:
        return None
    if not made:
        return None
    source = f"{evaluation.source}, in the chat template"
    return TokenSet(*_padded(made, tokenizer.pad_token_id or 0), source, "evaluation", "chat")


def _in_template(
    spec: DatasetSpec, texts: list[str], tokenizer: Any
) -> tuple[list[list[int]], str]:
    """Those sequences of calibration that hold text as chats; and what a person should know."""
    samples = spec.calibration.samples
    amount = spec.calibration.model_copy(update={"samples": round(spec.in_template * samples)})
    try:
        made = windows_in_template(texts, amount, tokenizer, pack=spec.pack)
    except ValueError as error:
        return [], NO_CHATS.format(share=f"{NO_SHARE} ({error})")
    share = SHARE.format(count=len(made), samples=samples) if made else NO_SHARE
    return made, NO_CHATS.format(share=share)


def _padded(sequences: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask: [sequences, longest]."""
    ids = [torch.tensor(sequence) for sequence in sequences]
    mask = pad_sequence([torch.ones_like(own, dtype=torch.bool) for own in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True, padding_value=pad), mask


Documents = tuple[list[str], tuple[str, ...]]  # texts, and what a person should know of them


def _documents(spec: DatasetSpec, split: Split, root: Path, convert: Convert) -> Documents:
    """Texts of one split; none of the other split's."""

    def read(source: str, part: str) -> Documents:
        return _read(spec, source, part, split, root, convert)

    other = spec.evaluation_name if spec.evaluation_name != spec.name else None
    if other is None and spec.evaluation_split is None:
        texts, notes = read(spec.name, spec.split)
        own = texts if spec.name == "stdlib" else divided(texts, split)
        if own and own[0] not in texts:  # but a part of the only one
            notes += ("one document: its first half calibrates, its second measures",)
        return own, notes
    if split == "calibration":
        return read(spec.name, spec.split)
    texts, notes = read(other or spec.name, spec.evaluation_split or spec.split)
    used = set(_documents(spec, "calibration", root, convert)[0])
    unseen = [text for text in texts if text not in used]
    if texts and not unseen:
        raise RecipeError(
            f"dataset {other or spec.name!r}: evaluation would use the documents of calibration. "
            "Set dataset.evaluation_name or dataset.evaluation_split to other ones, or leave both "
            "out, and one source is divided"
        )
    return unseen, notes


def _read(
    spec: DatasetSpec, source: str, part: str, split: Split, root: Path, convert: Convert
) -> Documents:
    """Texts of a source."""
    column = spec.messages_column or spec.column
    path = root / os.path.expanduser(source)
    if source == "stdlib":
        _refuse_parts(spec, source)
        return stdlib_documents(split), ()
    if path.exists():
        _refuse_parts(spec, source)
        texts = local_documents(path, column, convert)
    elif kind_of(path) in (*TEXT, *TABLES) or source.startswith((".", "/", "~")):
        raise RecipeError(f"dataset {source!r}: {path} does not exist. Give an existing file")
    else:
        texts = named_documents(source, spec.config, part, column, convert)
    return texts, tuple(_notes(spec, path, texts))


def _notes(spec: DatasetSpec, path: Path, texts: list[str]) -> Iterator[str]:
    """What was taken of a source, and what was left out."""
    if not path.exists() or are_tables(path):
        name = spec.messages_column
        yield f"chats of the column {name!r}" if name else f"text of the column {spec.column!r}"
    if path.is_dir() and (unread := left_out(path)):
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        yield f"of the folder are left out: {', '.join(unread[:3])}{more}"
    blank = sum(not text.strip() for text in texts)
    if blank:
        yield f"{blank} of {len(texts)} documents are blank, null or empty chats: left out"


def _refuse_parts(spec: DatasetSpec, source: str) -> None:
    """Refuse `config` and splits where no source has them."""
    parts = {"config": spec.config, "evaluation_split": spec.evaluation_split}
    parts["split"] = None if spec.split == "train" else spec.split
    given = sorted(f"dataset.{key}" for key, value in parts.items() if value is not None)
    if given and spec.evaluation_name is None:
        raise RecipeError(
            f"dataset {source!r}: {', '.join(given)} can only be set for a name that "
            "datasets.load_dataset reads. Leave it out; dataset.evaluation_name takes another file"
        )
