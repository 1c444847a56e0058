"""The tokenizer of a checkpoint, and the tokens that end its texts.

Settings of published layouts name code of their own, which is never run. Where the same vocabulary
can be read by a class of transformers, other settings say so: any with a tokenizer.json, and
sentencepiece models that nothing is done to but what the model itself says (Baichuan:
`BaichuanTokenizer` over tokenizer.model). ChatGLM's tokenizers put tokens of their own among those
of the vocabulary in code, and are not read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from formats.documents import read_document
from formats.errors import CheckpointError
from formats.families.values import GenerationValues
from formats.files import find_file
from formats.modeling.config import defer_activations
from formats.published import find_layout
from formats.stored.folder import auxiliary_files

if TYPE_CHECKING:
    from formats.checkpoint.read import Checkpoint

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
SENTENCEPIECE, COMPLETE = "tokenizer.model", "tokenizer.json"
VOCABULARIES = (COMPLETE, SENTENCEPIECE, "vocab.json", "vocab.txt", "tekken.json")
SUFFIXES = (".model", ".tiktoken")
PLAIN = ("baichuantokenizer",)  # classes, in small letters, that add nothing to sentencepiece
AGAIN = "Copy it again from the original model"
_NORMALIZER, _DUMMY_PREFIX = 3, 3  # fields of sentencepiece's ModelProto and NormalizerSpec


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds a vocabulary, damaged or not."""
    return any(file.name in VOCABULARIES or file.suffix in SUFFIXES for file in folder.iterdir())


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    defer_activations()
    if not has_tokenizer(folder):
        raise _unusable(folder, f"there is none: no {', '.join(VOCABULARIES)}")
    try:
        with _without_code(folder) as readable:
            tokenizer = AutoTokenizer.from_pretrained(
                readable, local_files_only=True, trust_remote_code=False
            )
        tokenizer("a b")  # damaged settings may show no sooner
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: tokenizers raises nothing but Exception itself
        raise _unusable(folder, f"{type(error).__name__}: {error}") from error
    if not words:  # what transformers makes of settings without a vocabulary
        raise _unusable(folder, "its vocabulary is empty")
    return tokenizer


@contextmanager
def _without_code(folder: Path) -> Iterator[Path]:
    """A folder with the same tokenizer, its settings those of a class of transformers."""
    if not needs_code(folder):
        yield folder
        return
    settings = native_settings(folder)
    if settings is None:
        raise CheckpointError(
            f"{folder}: its tokenizer needs code of its own (auto_map of {SETTINGS}), which is "
            "never run. Put a tokenizer.json of the same vocabulary beside the weights, such as "
            "that of a conversion of the model to transformers' own classes (GLM-4-9B-chat: "
            "zai-org/glm-4-9b-chat-hf)"
        )
    if not (folder / COMPLETE).exists() and find_spec("sentencepiece") is None:
        raise _unusable(folder, f"{SENTENCEPIECE} is read by `pip install sentencepiece protobuf`")
    with TemporaryDirectory() as made:
        for file in auxiliary_files(folder):
            shutil.copyfile(file, Path(made, file.name))
        Path(made, SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        yield Path(made)


def _unusable(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its tokenizer cannot be loaded; put the original model's tokenizer files, "
        "tokenizer.json and tokenizer_config.json, beside the weights "
        f"({' '.join(reason.split())[:200]})"
    )


def end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """End tokens that config.json, generation_config.json and the tokenizer name."""
    named: list[Any] = [checkpoint.config.get("eos_token_id"), tokenizer.eos_token_id]
    generation = read_document(checkpoint.path, GENERATION, GenerationValues, AGAIN)
    if generation is not None:
        named.append(generation.eos_token_id)
    flat = [t for value in named for t in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in flat if token is not None)


def needs_code(folder: Path) -> bool:
    """Whether a folder is of a published layout, and its tokenizer's settings name code."""
    config = read_document(folder, "config.json", dict[str, Any], AGAIN)
    return find_layout(config or {}) is not None and "auto_map" in _settings(folder)


def native_settings(folder: Path) -> dict[str, Any] | None:
    """The tokenizer's settings by which transformers reads it without code; None where none can.

    Args:
        folder: One whose tokenizer `needs_code`.
    """
    settings = {key: value for key, value in _settings(folder).items() if key != "auto_map"}
    if find_file(folder, COMPLETE) is not None:
        return settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    model = find_file(folder, SENTENCEPIECE)
    if model is None or str(settings.get("tokenizer_class")).lower() not in PLAIN:
        return None
    ends = {"add_bos_token": False, "add_eos_token": False} | settings
    prefix = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": _adds_prefix(model)}
    return ends | prefix


def _settings(folder: Path) -> dict[str, Any]:
    return read_document(folder, SETTINGS, dict[str, Any], AGAIN) or {}


def _adds_prefix(model: Path) -> bool:
    """Whether a sentencepiece model puts a space before each text; it does unless it says not."""
    for field, normalizer in _fields(model.read_bytes()):
        if field == _NORMALIZER and isinstance(normalizer, bytes):
            return dict(_fields(normalizer)).get(_DUMMY_PREFIX, 1) != 0
    return True


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message in protobuf's wire format.

    https://protobuf.dev/programming-guides/encoding: a field is a varint of its number and wire
    type, then a varint (0), 8 bytes (1), a length and as many bytes (2), or 4 bytes (5).
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(message):
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        return value

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield tag >> 3, message[at : at + size]
        at += size
