"""Text to token ids, with the special tokens that a tokenizer puts before a text: once."""

from __future__ import annotations

from typing import Any

MOST_LEADING = 4  # tokens that any tokenizer puts before a text


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds.

    A text that begins with those itself, as one does that a chat template has rendered, does not
    get them a second time.
    """
    ids = list(tokenizer(text, verbose=False)["input_ids"])  # no word on its length
    if not ids or ids[0] not in ids[1 : MOST_LEADING + 1]:
        return ids
    lead = leading_tokens(tokenizer)
    return ids[len(lead) :] if lead and ids[: 2 * len(lead)] == 2 * lead else ids


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text, such as a BOS token; many put nothing there."""
    ids = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    places = range(len(ids) - len(plain) + 1)
    return ids[: next((i for i in places if ids[i : i + len(plain)] == plain), 0)]
