"""Text for calibration and evaluation: from any source to token sequences with masks.

Sources, by `DatasetSpec.name`:

- `stdlib`: source files of the running interpreter's standard library, two fixed disjoint lists
  of modules for calibration and evaluation;
- a path to a text (.txt, .md, .py), JSON lines, Parquet or Arrow file, or a folder of them;
- anything else: a name for `datasets.load_dataset`.

No document serves both splits. A source that serves both is divided: its distinct documents, in the
order of their SHA-256, go in turn to calibration and to evaluation; a single document is cut at a
line's end near its middle. Where evaluation has its own source or split, documents that calibration
also has are left out of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.sources import (
    Convert,
    chat_text,
    divided,
    local_documents,
    named_documents,
    plain_text,
    stdlib_documents,
)
from calibrate.spec import TABLES, TEXT, DatasetSpec, Split, SplitSpec
from formats.errors import RecipeError

CHARACTERS_PER_TOKEN = 64  # read for each token asked for: far more than any tokenizer needs
FEWEST_CHARACTERS = 4 << 20  # a source up to here is tokenized whole

Encode = Callable[[str, int | None], list[int]]  # text, most tokens -> ids


@dataclass(frozen=True, eq=False)
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

    Plain documents are tokenized as a prompt is, with the special tokens that the tokenizer adds;
    rendered chats bring their own.

    Args:
        spec: What to read.
        tokenizer: A transformers tokenizer.
        split: Which amount, and which documents.
        root: Folder that relative paths start at; default the current one.

    Raises:
        RecipeError: the source is missing, empty, unreadable or too short.
    """
    amount = spec.calibration if split == "calibration" else spec.evaluation
    source = (spec.evaluation_name if split == "evaluation" else None) or spec.name
    documents = _documents(spec, split, root or Path.cwd(), tokenizer)
    encode = _encoder(tokenizer, special_tokens=spec.messages_column is None)
    if spec.pack:
        sequences, found = _packed(
            documents, amount, encode, tokenizer.eos_token_id, shorter=spec.fewer
        )
        needed, unit = f" of {amount.sequence_length} tokens each", "tokens"
    else:
        sequences, found = _unpacked(documents, amount, encode)
        needed, unit = ", one document each", "documents with text"
    if found == 0:
        raise RecipeError(
            f"dataset {source!r}: its {split} documents hold no text ({len(documents)} documents, "
            "all empty or padding). Check the column and the file's content"
        )
    if len(sequences) < (1 if spec.fewer else amount.samples):
        raise RecipeError(
            f"dataset {source!r}: {split} needs {amount.samples} samples{needed}; found {found} "
            f"{unit}, enough for {len(sequences)}. Lower dataset.{split}.samples, set "
            f"dataset.fewer, give more text{', or lower sequence_length' if spec.pack else ''}"
        )
    return _padded(sequences, tokenizer.pad_token_id or 0, source, split)


def _padded(sequences: list[list[int]], pad: int, source: str, split: Split) -> TokenSet:
    ids = torch.full((len(sequences), max(map(len, sequences))), pad, dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = True
    return TokenSet(ids, mask, source, split)


def _packed(
    documents: list[str], amount: SplitSpec, encode: Encode, eos: int | None, *, shorter: bool
) -> tuple[list[list[int]], int]:
    """Windows of the joined documents, chosen by the seed; and the tokens there are.

    With `shorter`, what is not enough for one window makes one.
    """
    stream: list[int] = []
    for text in _enough(documents, amount):
        ids = encode(text, None)
        stream += ids if not ids or eos is None or ids[-1] == eos else [*ids, eos]
    length = amount.sequence_length
    length = min(length, max(2, len(stream))) if shorter else length
    order = _permutation(len(stream) // length, amount)[: amount.samples]
    return [stream[i * length : (i + 1) * length] for i in order], len(stream)


def _unpacked(
    documents: list[str], amount: SplitSpec, encode: Encode
) -> tuple[list[list[int]], int]:
    """Documents chosen by the seed, cut at the sequence length; and how many were found."""
    length, sequences = amount.sequence_length, []
    for i in _permutation(len(documents), amount):
        ids = encode(documents[i][: CHARACTERS_PER_TOKEN * length], length)
        sequences += [ids] if ids else []
        if len(sequences) == amount.samples:
            break
    return sequences, len(sequences)


def _enough(documents: list[str], amount: SplitSpec) -> list[str]:
    """All documents, or of a large source as many, chosen by the seed, as can be needed."""
    wanted = CHARACTERS_PER_TOKEN * amount.samples * amount.sequence_length
    most = max(FEWEST_CHARACTERS, wanted)
    if sum(map(len, documents)) <= most:
        return documents
    chosen, held = [], 0
    for i in _permutation(len(documents), amount):
        chosen.append(i)
        held += len(documents[i])
        if held >= most:
            break
    return [documents[i][:most] for i in sorted(chosen)]


def _permutation(count: int, amount: SplitSpec) -> list[int]:
    generator = torch.Generator().manual_seed(amount.seed)
    return torch.randperm(count, generator=generator).tolist()


def _encoder(tokenizer: Any, *, special_tokens: bool) -> Encode:
    """Text to its token ids; none where there is no more than special tokens, or a single one."""
    special = set(tokenizer.all_special_ids)

    def encode(text: str, most: int | None) -> list[int]:
        options = {"add_special_tokens": special_tokens, "verbose": False}  # no word on its length
        ids = tokenizer(text, **options)["input_ids"][:most]
        return ids if len(ids) > 1 and not special.issuperset(ids) else []

    return encode


def _documents(spec: DatasetSpec, split: Split, root: Path, tokenizer: Any) -> list[str]:
    """Texts of one split; none of the other split's."""
    chats = spec.messages_column is not None
    convert = chat_text(tokenizer, spec.chat_template_kwargs) if chats else plain_text

    def read(source: str, part: str) -> list[str]:
        return _read(spec, source, part, split, root, convert)

    other = spec.evaluation_name if spec.evaluation_name != spec.name else None
    if other is None and spec.evaluation_split is None:
        documents = read(spec.name, spec.split)
        return documents if spec.name == "stdlib" else divided(documents, split)
    if split == "calibration":
        return read(spec.name, spec.split)
    documents = read(other or spec.name, spec.evaluation_split or spec.split)
    used = set(_documents(spec, "calibration", root, tokenizer))
    unseen = [text for text in documents if text not in used]
    if documents and not unseen:
        raise RecipeError(
            f"dataset {other or spec.name!r}: evaluation would use the documents of calibration. "
            "Set dataset.evaluation_name or dataset.evaluation_split to other ones, or leave both "
            "out, and one source is divided"
        )
    return unseen


def _read(
    spec: DatasetSpec, source: str, part: str, split: Split, root: Path, convert: Convert
) -> list[str]:
    """Texts of a source."""
    column = spec.messages_column or spec.column
    path = root / Path(source).expanduser()
    if source == "stdlib" or path.exists():
        _refuse_parts(spec, source)
        stdlib = source == "stdlib"
        return stdlib_documents(split) if stdlib else local_documents(path, column, convert)
    if path.suffix in (*TEXT, *TABLES) or source.startswith((".", "/", "~")):
        raise RecipeError(f"dataset {source!r}: {path} does not exist. Give an existing file")
    return named_documents(source, spec.config, part, column, convert)


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
