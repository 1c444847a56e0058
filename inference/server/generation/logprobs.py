"""Log probabilities in the two forms of OpenAI: of chats, and the older one of completions."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from inference.server.generation.token_text import TokenTexts

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
        texts: Of tokens.
        top: How many of the likeliest tokens are told.
        offset: Characters that stand before the first token, such as an echoed prompt's.
    """

    def __init__(self, texts: TokenTexts, top: int, offset: int = 0) -> None:
        self._texts, self._top, self._offset = texts, top, offset
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
        told = _likeliest(known, self._top)
        if all(other != token for other, _ in told):
            told.append((token, known[token]))
        tops: dict[str, float] = {}
        for other, value in told:
            tops.setdefault(self._texts.text(other), max(value, LEAST))
        return tops

    def _place(self, token: int) -> int:
        """Where the token's text begins, in characters."""
        place = self._offset
        self._offset += len(self._decoder.decode(self._texts.shown(token)))
        return place
