"""Text of a growing token sequence, held back where it may still change or be a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what an unfinished character decodes to


class Detokenizer:
    """Decodes tokens as they come.

    A token may end within a character: its text is then held back until the character is complete.
    Text that could be the beginning of a stop text is held back as well.

    Args:
        tokenizer: A transformers tokenizer.
        stop: Texts that end the output.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: tokens before it no longer influence the text
        self._read = 0  # tokens whose text is in `_decoded`
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        """Take one token; `text` and `stopped` tell what came of it."""
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._tokens))
        if after.endswith(REPLACEMENT):
            return
        self._decoded += after[len(before) :]
        self._context, self._read = self._read, len(self._tokens)
        self._release()

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        before = self._decode(self._context, self._read)
        self._decoded += self._decode(self._context, len(self._tokens))[len(before) :]
        self._release()
        if not self.stopped:
            self.text = self._decoded

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=True)

    def _release(self) -> None:
        found = [i for i in (self._decoded.find(s, self._from(s)) for s in self._stop) if i >= 0]
        if found:
            self.text, self.stopped = self._decoded[: min(found)], True
            return
        held = max((self._overlap(stop) for stop in self._stop), default=0)
        self.text = self._decoded[: len(self._decoded) - held]

    def _from(self, stop: str) -> int:
        """Where a stop text could begin that was not found before."""
        return max(0, len(self.text) - len(stop))

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the text ends with."""
        most = min(len(stop) - 1, len(self._decoded))
        return next((n for n in range(most, 0, -1) if self._decoded.endswith(stop[:n])), 0)
