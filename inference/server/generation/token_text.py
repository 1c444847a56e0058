"""The bytes and the text of single tokens, as log probabilities tell them.

A token's text in `tokens` or `top_logprobs` is its own, whatever stands around it: of a byte-level
vocabulary its bytes, of a SentencePiece one its piece with spaces for `▁`. What is no UTF-8 alone
is spelled `bytes:\\xe2\\x80`, as OpenAI does, so that different tokens stay different.
"""

from __future__ import annotations

import json
import re
from typing import Any

BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes (Radford et al. 2019, GPT-2):
    printable ones stand for themselves, the others for those from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenTexts:
    """Bytes and texts of tokens; each is made once.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str())["decoder"] if backend is not None else None
        self._byte_level = '"ByteLevel"' in json.dumps(parts)
        self._alphabet = _byte_alphabet()
        self._special = {int(token) for token in tokenizer.all_special_ids}
        self._made: dict[int, tuple[bytes, str]] = {}

    def bytes(self, token: int) -> bytes:
        """Its bytes."""
        return self._of(token)[0]

    def text(self, token: int) -> str:
        """Its text, or its bytes spelled out where they are none."""
        return self._of(token)[1]

    def shown(self, token: int) -> bytes:
        """The bytes that it adds to a text: none where it is a special token."""
        return b"" if token in self._special else self._of(token)[0]

    def _of(self, token: int) -> tuple[bytes, str]:
        if token not in self._made:
            data = self._read(token)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._made[token] = data, text
        return self._made[token]

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
