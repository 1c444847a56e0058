"""Plain text as chats, for a model that is served through a chat template.

Such a model meets the template's own tokens in every prompt, and a scale that was chosen without
them may not hold them. Where there is nothing but text, its passages make chats: a user asks for
what follows the first part of one, and the assistant's answer is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

ASKED = ("Continue this text:", "What comes after this?", "Write on from here.")
PASSAGES = (300, 900, 1500)  # characters, in turn: templates' tokens stand at many positions
GIVEN = 3  # of a passage, the first of so many parts is the user's

Chat = list[dict[str, str]]


def as_chats(documents: Iterable[str]) -> Iterator[Chat]:
    """Chats of a user's and an assistant's message, of whatever the documents hold."""
    sizes, asked = cycle(PASSAGES), cycle(ASKED)
    for text in documents:
        start = 0
        while start < len(text):
            end = _cut(text, start, next(sizes))
            middle = _cut(text, start, (end - start) // GIVEN)
            given, answer = text[start:middle].strip(), text[middle:end].strip()
            if given and answer:
                yield [
                    {"role": "user", "content": f"{next(asked)}\n\n{given}"},
                    {"role": "assistant", "content": answer},
                ]
            start = end


def _cut(text: str, start: int, size: int) -> int:
    """Where a passage of about so many characters ends: at a line's end, a sentence's, a word's."""
    most = start + size
    if most >= len(text):
        return len(text)
    for mark in ("\n", ". ", " "):
        end = text.rfind(mark, start + size // 2, most)
        if end > start:
            return end + len(mark)
    return max(most, start + 1)
