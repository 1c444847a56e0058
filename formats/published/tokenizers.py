"""Tokenizers of published layouts, whose settings name code of their own, which is never run.

Where the same vocabulary can be read by a class of transformers, other settings say so: any with a
tokenizer.json, and sentencepiece models that nothing is done to but what the model itself says
(Baichuan: `BaichuanTokenizer` over tokenizer.model). ChatGLM's tokenizers put tokens of their own
among those of the vocabulary in code, and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.documents import read_document
from formats.files import find_file
from formats.published.layouts import find_layout

SETTINGS = "tokenizer_config.json"
SENTENCEPIECE, COMPLETE = "tokenizer.model", "tokenizer.json"
PLAIN = ("baichuantokenizer",)  # classes, in small letters, that add nothing to sentencepiece
AGAIN = "Copy it again from the original model"
_NORMALIZER, _DUMMY_PREFIX = 3, 3  # fields of sentencepiece's ModelProto and NormalizerSpec


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
