"""What a certificate is measured with: the level's sizes, seeds, the text, both engines."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from calibrate.sources import guess_columns, local_documents, plain_text, stdlib_documents
from formats.chat_template import leading_tokens, read_messages, render_chat
from formats.chat_tokens import ChatEncoder, Messages
from formats.errors import RecipeError
from inference.engine import Engine

LevelName = Literal["quick", "full"]


@dataclass(frozen=True)
class Level:
    """How much is measured.

    Attributes:
        windows: Of each kind of text.
        window: Tokens of one.
        long: Long windows of each kind of text.
        longest: Most tokens of a long window.
        answers: Prompts that both models answer.
        drawn: How many of these are answered by sampling, too.
        new: Most tokens of an answer.
        objects: JSON objects or calls.
        contexts: Of each task and length.
        asked: Questions about each.
        reach: Most tokens of a context.
        tasks: Items of each standard task, where lm-eval is installed.
    """

    windows: int
    window: int
    long: int
    longest: int
    answers: int
    drawn: int
    new: int
    objects: int
    contexts: int
    asked: int
    reach: int
    tasks: int = 0


LEVELS: Mapping[LevelName, Level] = {
    "quick": Level(12, 512, 1, 4096, 48, 16, 64, 32, 3, 8, 2048),
    "full": Level(48, 512, 4, 32768, 128, 64, 256, 96, 6, 8, 1 << 20, 100),
}


@dataclass(frozen=True)
class Setting:
    """All that decides what is asked; equal settings give equal cases.

    Attributes:
        letters: What private-use characters of the texts stand for (`formats.chat_tokens`).
        length: Most tokens of a sequence that both models allow.
    """

    level: Level
    seed: int
    texts: Mapping[str, str]
    letters: Mapping[str, str]
    tokenizer: Any
    length: int

    def draw(self, purpose: str) -> random.Random:
        """Random numbers of their own for each purpose."""
        return random.Random(f"{self.seed} {purpose}")

    @cached_property
    def _encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer)

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids; with what stands before every text where it begins one."""
        ids = self._encoder.encode(text, self.letters)
        return [*leading_tokens(self.tokenizer), *ids] if begins else ids

    def windows(self, kind: str, count: int, length: int, purpose: str) -> list[list[int]]:
        """Pieces of a text of so many tokens, one from each of equal parts of it."""
        text, draw, found = self.texts[kind], self.draw(f"{purpose} {kind}"), list[list[int]]()
        for i in range(count):
            start = int((i + draw.random() / 2) * len(text) / count)
            start = text.find("\n", start) + 1
            taken = text[start : start + 12 * length] or text[: 12 * length]
            found.append(self.encode(taken, begins=True)[:length])
        return [ids for ids in found if len(ids) > length // 2]


class Pair(NamedTuple):
    """Both engines, idle."""

    original: Engine
    quantized: Engine


def read_texts(prompts: Path | None, tokenizer: Any) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Text by its kind, and the letters of `Setting`: a file's, or prose and code of Python's own.

    Args:
        prompts: As calibration data: a table with a column of text or of chats, or text.

    Raises:
        RecipeError: it cannot be read, or holds too little.
    """
    if prompts is None:
        return {"prose": _prose(), "code": "\n".join(stdlib_documents("evaluation"))}, {}
    column, chats = guess_columns(prompts), dict[str, Messages]()

    def text_of(value: Any) -> str:
        if isinstance(value, str):
            return plain_text(value)
        messages = read_messages(value)
        text = render_chat(tokenizer, messages)
        chats[text] = messages
        return text

    rows = local_documents(prompts, next(iter(column.values()), "text"), text_of)
    try:
        hidden, letters = ChatEncoder(tokenizer).texts([*chats.values()])
    except ValueError as error:
        raise RecipeError(f"{prompts}: {error}") from error
    served = dict(zip(chats, hidden, strict=True))  # where a control token in a message is text
    text = "\n\n".join(served.get(row, row) for row in rows if row.strip())
    if len(text) < 2000:
        raise RecipeError(
            f"{prompts}: found {len(text):,} characters of text; 2,000 are needed at the least. "
            "Give more prompts, or leave --prompts out"
        )
    return {"prompts": text}, letters


def _prose() -> str:
    """The language reference that Python keeps for its help, or what modules say of themselves.

    Raises:
        RecipeError: this Python has neither.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        parts = [text.split('"""')[1] for text in stdlib_documents("evaluation") if '"""' in text]
        return "\n\n".join(parts)
    return "\n\n".join(topics[name] for name in sorted(topics))
