"""Log probabilities in the two forms of OpenAI: of chats, and the older one of completions.

`TokenTexts` has the bytes and the text of single tokens. A token's text in `tokens` or
`top_logprobs` is its own, whatever stands around it: of a byte-level vocabulary its bytes, of a
SentencePiece one its piece with spaces for `▁`. What is no UTF-8 alone is spelled `bytes:\xe2\x80`,
as OpenAI does, so that different tokens stay different.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Bytes and texts of the tokens of a transformers tokenizer; each is made once."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str())["decoder"] if backend is not None else None
        self._byte_level = '"ByteLevel"' in json.dumps(parts)
        self._alphabet = {char: byte for byte, char in bytes_to_unicode().items()}  # GPT-2's
        self._special = {int(token) for token in tokenizer.all_special_ids}
        self._of = cache(self._spelled)

    def bytes(self, token: int) -> bytes:
        """Its bytes."""
        return self._of(token)[0]

    def text(self, token: int) -> str:
        """Its text, or its bytes spelled out where they are none."""
        return self._of(token)[1]

    def shown(self, token: int) -> bytes:
        """The bytes that it adds to a text: none where it is a special token."""
        return b"" if token in self._special else self._of(token)[0]

    def _spelled(self, token: int) -> tuple[bytes, str]:
        data = self._read(token)
        try:
            return data, data.decode()
        except UnicodeDecodeError:
            return data, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _read(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's vocabulary is longer than the tokenizer's
            return b""
        added = token in self._tokenizer.added_tokens_decoder
        if self._byte_level and not added and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if byte := BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return (piece if added else piece.replace("▁", " ")).encode()


LEAST = -9999.0  # JSON has no infinity


def _likeliest(logprobs: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The so many likeliest tokens, of equals the lowest ids."""
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count]


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[Mapping[int, float]], top: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: an entry a token, with its bytes and the likeliest ones."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = list(texts.bytes(token))
        return {"token": texts.text(token), "logprob": max(logprob, LEAST), "bytes": data}

    content = [
        entry(token, known[token])
        | {"top_logprobs": [entry(*item) for item in _likeliest(known, top)]}
        for token, known in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, which comes in parts: an offset follows from those
    before.

    Args:
        top: How many of the likeliest tokens are returned.
    """

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts, self._top, self._offset = texts, top, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def part(
        self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, float] | None]
    ) -> dict[str, Any]:
        """Of the next tokens; None is that of a prompt's first token."""
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": [self._texts.text(token) for token in tokens],
            "token_logprobs": [None if k is None else max(k[t], LEAST) for t, k in pairs],
            "top_logprobs": [self._tops(token, known) for token, known in pairs],
            "text_offset": [self._place(token) for token in tokens],
        }

    def _tops(self, token: int, known: Mapping[int, float] | None) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; of equal texts the likeliest counts."""
        if known is None:
            return None
        likeliest = _likeliest(known, self._top)
        if all(other != token for other, _ in likeliest):
            likeliest.append((token, known[token]))
        tops: dict[str, float] = {}
        for other, value in likeliest:
            tops.setdefault(self._texts.text(other), max(value, LEAST))
        return tops

    def _place(self, token: int) -> int:
        """Where the token's text begins, in characters."""
        place = self._offset
        self._offset += len(self._decoder.decode(self._texts.shown(token)))
        return place
